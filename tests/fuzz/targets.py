"""Target of fuzzing: its name, its inputs, and the check of one input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

Check = Callable[[Any], str]
"""Returns a word for what became of the input: the corpus keeps the smallest input for each. Fails by any exception."""
MakeDatabase = Callable[[str], str]
Open = Callable[[MakeDatabase], AbstractContextManager[Check]]
"""Builds what the check needs, such as a running node on a database."""


@dataclass(frozen=True)
class Target:
    """`examples` is the number of inputs in `make test`. The `known` ones have broken a promise before.

    A node that was harmed fails every later check, too: `keeps_state`, and inputs are not made smaller.
    """

    name: str
    inputs: SearchStrategy[Any]
    open: Open
    examples: int = 100
    known: Sequence[Any] = ()
    keeps_state: bool = False


def of_rules(name: str, inputs: SearchStrategy[Any], check: Check, known: Sequence[Any] = ()) -> Target:
    """A target without I/O."""
    return Target(name, inputs, lambda _: nullcontext(check), examples=300, known=known)
