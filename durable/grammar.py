"""Words of messages that depend on names or a number: "an AsyncEngine", "3 messages wait", "; did you mean 'x'?"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

_NEAR: Final = 0.65
"""Likeness from which on a name may be a misspelling of another, of 1."""

_HISSING: Final = ("sses", "ches", "shes", "xes")
_SINGULAR: Final = {"": "", "are": "is", "were": "was", "have": "has"}


def with_article(name: str) -> str:
    """The name of a class with its article: "a Retry", "an AsyncEngine"."""
    return f"{'an' if name[0].upper() in 'AEIO' else 'a'} {name}"


def several(count: int, nouns: str, verb: str = "", *, written: str | None = None) -> str:
    """A number with its noun and verb, both given in the plural; `written` is the number in another form.

    several(1, "dead letters", "wait")   "1 dead letter waits"
    """
    number = written or f"{count:,}"
    if count == 1:
        nouns, verb = _singular(nouns), _SINGULAR.get(verb, f"{verb}s")
    return f"{number} {nouns} {verb}".rstrip()


def _singular(nouns: str) -> str:
    if nouns.endswith("ies"):
        return f"{nouns[:-3]}y"
    return nouns[:-2] if nouns.endswith(_HISSING) else nouns.removesuffix("s")


def lasting(duration: timedelta) -> str:
    """A length of time in its largest unit: 45 s, 12 min, 3 h, 9 days."""
    seconds = max(0.0, duration.total_seconds())
    for unit, length in (("days", 172_800), ("h", 7_200), ("min", 120)):
        if seconds >= length:
            return f"{seconds / {'days': 86_400, 'h': 3_600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def suggestion(name: str, known: Iterable[str], written: str = "{}") -> str:
    """`; did you mean 'x'?` for the nearest other name as it is `written`, or nothing."""
    others = [each for each in known if each != name]
    near = difflib.get_close_matches(name, others, n=1, cutoff=_NEAR)
    return f"; did you mean {written.format(near[0])!r}?" if near else ""
