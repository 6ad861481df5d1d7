"""The words of the project: docstrings, errors, log messages, help texts and names of tests are plain English."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from durable import errors
from durable.cli.app import command_line
from durable.settings import Settings

ROOT: Final = Path(__file__).parents[2]

_ROOMS: Final = ("durable", "recovery", "transports")
FOLDERS: Final = sorted(
    {file.parent.relative_to(ROOT).as_posix() for room in _ROOMS for file in (ROOT / room).rglob("*.py")}
)
TEST_FOLDERS: Final = ("durable/testing", "tests")
"""Folders with names of tests, below which all folders count."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_SUBJECTS: Final = words(
    "what whatever who whoever whom whose which how why when where whether nobody somebody someone anybody anyone "
    "everybody everyone nothing something anything everything it its they them these those this that he she we you "
    "i"
)
NO_OPENINGS: Final = NO_SUBJECTS | words(
    "about after against also although among and are as at because before behind beside besides between beyond but by "
    "does during for from has have if in into is of off on onto or out over since so than then through to toward "
    "under unless until up upon was were while with within without"
)
RELATIVE: Final = words("that which who whose whom what whatever whoever it nobody somebody")

VERBS: Final = words(
    "archive call cancel change check compare delete describe discard drop edit erase group inspect list make operate "
    "pause prove replay reschedule resume return run send show update upgrade write"
)
"""The imperatives that a command's help may start with."""

ERRORS: Final = frozenset(
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.DurableError) and not issubclass(value, errors.Verdict)
)
LEVELS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGS: Final = frozenset({"log", "_log", "logger", "_logger", "_logs"})


class Finding(NamedTuple):
    line: int
    text: str
    rule: str


Check = Callable[[ast.Module], Iterator[Finding]]


def first_word(text: str) -> str:
    word = re.match(r"[\W_]*([A-Za-z]+(?:'[a-z]+)?)", text)
    return word[1].lower() if word else ""


# ---------------------------------------------------------------- what is read in the source


def docstrings(tree: ast.Module) -> Iterator[Finding]:
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text, line = ast.get_docstring(node) or "", getattr(node, "lineno", 1)
            if first_word(text) in NO_OPENINGS:
                yield Finding(line, text, "a docstring starts with an imperative verb or a noun phrase")
            elif is_function(node) and re.search(r"[^s]s$", first_word(text)):
                yield Finding(line, text, "the docstring of a function starts with an imperative verb")


def is_function(node: ast.AST) -> bool:
    """Tell a function from a class, and from a property, which is documented like a value."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def error_messages(tree: ast.Module) -> Iterator[Finding]:
    for call in calls(tree):
        if not isinstance(call.func, ast.Name) or call.func.id not in ERRORS:
            continue
        text = literal(call)
        if text is None:
            continue
        if NO_SUBJECTS.intersection(map(first_word, (text, text.partition(": ")[2]))):
            yield Finding(call.lineno, text, "the subject of an error is a noun")
        if not re.search(r"[:;] ", text):
            yield Finding(
                call.lineno, text, "an error says what is wrong, then what to do: `<thing>: <fault>; <advice>`"
            )


def log_messages(tree: ast.Module) -> Iterator[Finding]:
    for call in calls(tree):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=log), attr=level), args=[message, *_]) if (
                log in LOGS and level in LEVELS
            ):
                pass
            case _:
                continue
        match message:
            case ast.JoinedStr() | ast.BinOp():
                yield Finding(call.lineno, ast.unparse(message), "a log message is a constant with %-fields")
            case ast.Constant(value=str(text)) if text.startswith("%") or first_word(text) in NO_SUBJECTS:
                yield Finding(call.lineno, text, "a log message starts with a noun")
            case _:
                pass


def names_of_tests(tree: ast.Module) -> Iterator[Finding]:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_odd_test(node.name):
            yield Finding(node.lineno, node.name, "a test is named test_<thing>_<does what>[_when_<condition>]")


def is_odd_test(name: str) -> bool:
    first, *parts = name.split("_")
    return first == "test" and bool(parts) and (bool(RELATIVE.intersection(parts)) or parts[0] in NO_OPENINGS)


def may_have_odd_tests(source: str) -> bool:
    """Tell, without parsing, whether a function here may be such a test, or the text of one."""
    return any(map(is_odd_test, re.findall(r"\bdef\s+(test_\w*)", source)))


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in nodes(tree) if isinstance(node, ast.Call))


@lru_cache(maxsize=1)
def nodes(tree: ast.Module) -> list[ast.AST]:
    """The tree that is read now; each check walks it."""
    return list(ast.walk(tree))


def literal(call: ast.Call) -> str | None:
    """Return the text of the first argument, with {} for each value, or None when it is no literal."""
    match call.args:
        case [ast.Constant(value=str(text)), *_]:
            return text
        case [ast.JoinedStr(values=parts), *_]:
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        case _:
            return None


def findings(paths: Sequence[Path], *checks: Check) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{found.line}: {found.rule}: {found.text!r}"
        for path in paths
        for tree in [ast.parse(path.read_text())]
        for check in checks
        for found in check(tree)
    ]


def modules(folder: str, pattern: str) -> list[Path]:
    found = sorted((ROOT / folder).glob(pattern))
    assert found, f"{folder} has no modules"
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_source_follows_the_rules_for_words(folder: str) -> None:
    assert findings(modules(folder, "*.py"), docstrings, error_messages, log_messages) == []


@pytest.mark.parametrize("folder", TEST_FOLDERS)
def test_names_of_tests_follow_their_pattern(folder: str) -> None:
    odd = [path for path in modules(folder, "**/*.py") if may_have_odd_tests(path.read_text())]
    assert findings(odd, names_of_tests) == []


@pytest.mark.parametrize(
    ("check", "source", "count"),
    [
        (docstrings, '"""What a command works on."""', 1),
        (docstrings, 'def f():\n    """In a unit of work."""', 1),
        (docstrings, 'class A:\n    """Those that are named."""', 1),
        (docstrings, 'def f():\n    """Returns one body."""', 1),
        (docstrings, 'class A:\n    @property\n    def f(self):\n        """Letters left."""', 0),
        (docstrings, '"""Bodies of letters."""\ndef f():\n    """Read one body."""', 0),
        (error_messages, 'raise WiringError("name one")', 1),
        (error_messages, 'raise InvalidSetting("what is given is wrong; give another")', 1),
        (error_messages, 'raise InvalidSetting("--reason: it is empty; give one")', 1),
        (error_messages, 'raise InvalidSetting(f"{option}: {text!r} is not a time; write 90s")', 0),
        (error_messages, "raise InvalidSetting(text)", 0),
        (error_messages, 'raise ValueError("no")', 0),
        (log_messages, 'log.info(f"handler {name} resumed")', 1),
        (log_messages, 'log.info("%s is %s", a, b)', 1),
        (log_messages, 'log.info("handler %s resumed", a)', 0),
        (names_of_tests, "def test_what_is_refused_is_told(): ...", 1),
        (names_of_tests, "async def test_lock_that_is_held(): ...", 1),
        (names_of_tests, "def test_lock_held_by_another_raises_conflict(): ...", 0),
    ],
)
def test_check_finds_each_fault(check: Check, source: str, count: int) -> None:
    assert len(list(check(ast.parse(source)))) == count
    assert check is not names_of_tests or may_have_odd_tests(source) == bool(count)


# ---------------------------------------------------------------- the help of the command line


def commands(command: Any, path: str = "durable-agent") -> Iterator[Any]:
    """Walk all commands and groups of the command line."""
    yield pytest.param(command, id=path)
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{path} {name}")


COMMANDS: Final = list(commands(command_line()))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_a_sentence_with_an_imperative(command: Any) -> None:
    text = inspect.cleandoc(command.help or "")
    assert text, "a command has a help text"
    assert first_word(text) in VERBS, text
    assert all(paragraph.endswith(".") for paragraph in text.split("\n\n")), text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_an_option_is_a_phrase_in_lower_case(command: Any) -> None:
    for parameter in command.params:
        text = parameter.help or ""
        assert text.strip(), f"{parameter.name} has no help"
        if parameter.name == "help" or parameter.name in Settings.model_fields:
            continue  # of the library; of the settings, which have a page
        assert text[0].islower(), f"{parameter.name}: {text}"
        assert not text.endswith("."), f"{parameter.name}: {text}"
        assert first_word(text) not in NO_OPENINGS, f"{parameter.name}: {text}"


def test_walk_reaches_the_commands_of_groups() -> None:
    names = {parameter.id for parameter in COMMANDS}
    assert {"durable-agent", "durable-agent run", "durable-agent dead-letters debug"} <= names


# ---------------------------------------------------------------- the settings


@pytest.mark.parametrize("name", Settings.model_fields)
def test_description_of_a_setting_is_a_phrase(name: str) -> None:
    text = Settings.model_fields[name].description or ""
    assert text, "a setting has a description"
    assert first_word(text) not in NO_OPENINGS, text
    assert not text.endswith("."), text
