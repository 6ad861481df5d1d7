"""Words of messages that depend on a name or a number: "an AsyncEngine", "1 message waits", "3 messages wait"."""

from __future__ import annotations

from typing import Final

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
        noun = f"{nouns[:-3]}y" if nouns.endswith("ies") else nouns.removesuffix("s")
        nouns, verb = noun, _SINGULAR.get(verb, f"{verb}s")
    return f"{number} {nouns} {verb}".rstrip()
