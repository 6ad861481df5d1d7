"""Steps of the pipeline: each is a command by itself, and `pipeline run` takes several in one Spark session.

    options ──> checked ──yield──> done ──> Ended ──> text or JSON, exit code

A step is a generator function. Up to its `yield` it refuses options that cannot be, and looks at nothing but settings
and the application; then it does what it is for, and returns what it came to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import typer

from durable.cli.command import Command, taking
from durable.cli.endings import FAILED
from durable.cli.output import Block, emit


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
        work = step(**given)
        next(work)
        return work

    return begin


def finished(work: Step) -> Ended:
    """Do what was checked."""
    try:
        next(work)
    except StopIteration as end:
        ended: Ended = end.value
        return ended
    raise RuntimeError("a step yields once, when its options are checked")


def alone(step: Callable[..., Step]) -> Command:
    """The command that takes this step only."""

    def command(work: Step) -> None:
        ended = finished(work)
        emit(ended.document, *ended.blocks)
        if ended.failed:
            raise typer.Exit(ended.exit_code)

    command.__name__, command.__doc__ = step.__name__, step.__doc__
    return taking(work=begun(step))(command)
