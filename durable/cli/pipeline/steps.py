"""Steps of the pipeline: each is a command by itself, and `pipeline run` takes several in one Spark session.

    options ──> checked ──yield──> done ──> Ended ──> text or JSON, exit code

A step is a generator function. Up to its `yield` it refuses options that cannot be, and looks at nothing but settings
and the application; then it does what it is for, and returns what it came to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import typer

from durable.cli.endings import FAILED
from durable.cli.output import Block, print_blocks, print_json
from durable.cli.target import Json
from durable.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a step: a document for JSON, blocks for people. `failed`: the step has found a fault."""

    document: Mapping[str, Any]
    blocks: Sequence[Block]
    failed: bool = False

    @property
    def exit_code(self) -> int:
        return FAILED if self.failed else 0


Step: TypeAlias = Generator[None, None, Ended]


def begun(step: Callable[..., Step]) -> Callable[..., Step]:
    """Check the options of a step, and leave the rest to finished(). Raises what the step finds wrong with them."""

    @wraps(step)
    def begin(**given: Any) -> Step:
        _refuse_bytes(given)
        work = step(**given)
        next(work)
        return work

    return begin


def in_text(command: Callable[..., None]) -> Callable[..., None]:
    """Refuse bytes that are no text, which would break the connection to the JVM, before a command runs."""

    @wraps(command)
    def checked(**given: Any) -> None:
        _refuse_bytes(given)
        command(**given)

    return checked


def _refuse_bytes(options: Mapping[str, Any]) -> None:
    for name, given in options.items():
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, str) and not _is_text(each):
                raise InvalidSetting(f"{name.strip('_')}: {each!r} is no text in UTF-8; write it in UTF-8")


def _is_text(given: str) -> bool:
    """True for text. Bytes of the command line that are no UTF-8 arrive as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


def finished(work: Step) -> Ended:
    """Do what was checked."""
    try:
        next(work)
    except StopIteration as end:
        ended: Ended = end.value
        return ended
    raise RuntimeError("a step yields once, when its options are checked")


def alone(step: Callable[..., Step]) -> Callable[..., None]:
    """The command that takes this step only, with --json beside its options."""
    begin = begun(step)

    def command(*, json: bool, **given: Any) -> None:
        ended = finished(begin(**given))
        print_json(ended.document) if json else print_blocks(ended.blocks)
        if ended.failed:
            raise typer.Exit(ended.exit_code)

    own = inspect.signature(step, eval_str=True).parameters.values()
    as_json = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    options = [*(each for each in own if each.name != "debug"), as_json, *(e for e in own if e.name == "debug")]
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
    command.__name__, command.__doc__ = step.__name__, step.__doc__
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command
