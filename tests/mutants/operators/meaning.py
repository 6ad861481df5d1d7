"""The meaning of a module for the behaviour of durable: its tree without the parts that no test can or should notice.

A change of such a part makes no mutant:

    annotations, docstrings, `if TYPE_CHECKING`   not executed, or not looked at
    arguments of a log call, texts of a raise      words for people; the event, the error and its class stay
    numbers that a module or class names           a tuning: one more or less is no fault
    repr, frozen, slots and such of a class        they forbid mistakes of a programmer, at no place of the program
    @override, @final, @overload and such          for type checkers
    the `*` and `/` among parameters               callers may do less, and none does
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final

_LOGS: Final = frozenset({"log", "_log", "logger", "_logger"})
_FORBIDDING: Final = frozenset({"repr", "frozen", "slots", "kw_only", "gc", "weakref_slot", "eq", "order"})
_FOR_TYPES: Final = frozenset({"override", "final", "overload", "abstractmethod", "runtime_checkable"})
_NUMBERS: Final = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


def meaning(source: str) -> str | None:
    """Return a text that two modules of one meaning share, or None when the source is no program."""
    try:
        compile(source, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return ast.dump(_Meaning().visit(ast.parse(source)))


class _Meaning(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._with_names(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if _name(each) not in _FOR_TYPES]
        node.keywords = _without_forbidding(node.keywords)
        for each in node.decorator_list:
            if isinstance(each, ast.Call):
                each.keywords = _without_forbidding(each.keywords)
        return self._with_names(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.defaults = [*node.defaults, *(each for each in node.kw_defaults if each is not None)]
        node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        names = {_name(each) for each in ast.walk(node.test)}
        return ast.Pass() if "TYPE_CHECKING" in names else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return ast.Pass()
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and _name(called.value) in _LOGS:
            return ast.Expr(ast.Constant(called.attr))
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        for each in ast.walk(node):
            if isinstance(each, ast.JoinedStr):
                each.values = []
        return self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        node.decorator_list = [each for each in node.decorator_list if _name(each) not in _FOR_TYPES]
        return self.generic_visit(node)

    def _with_names(self, node: ast.Module | ast.ClassDef) -> ast.AST:
        for each in node.body:
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None and _is_tuning(each.value):
                each.value = ast.Constant(0)
        return self.generic_visit(node)


def _without_forbidding(keywords: Sequence[ast.keyword]) -> list[ast.keyword]:
    return [each for each in keywords if each.arg not in _FORBIDDING]


def _is_tuning(value: ast.expr) -> bool:
    """Is it a number, or a duration, or a calculation with such?"""
    if isinstance(value, ast.Call):
        return _name(value.func) == "timedelta"
    parts: Any = list(ast.walk(value))
    numbers = [each.value for each in parts if isinstance(each, ast.Constant)]
    return all(isinstance(each, _NUMBERS) for each in parts) and all(type(each) in (int, float) for each in numbers)


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=called):
            return _name(called)
        case _:
            return ""
