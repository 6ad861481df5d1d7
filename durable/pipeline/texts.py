"""Texts that are handed to Spark: names of batches and replays, and whatever else comes from a caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.errors import InvalidSetting
from durable.messages.validation import MAX_TEXT_BYTES, utf8_bytes

_MOST_SHOWN: Final = 100  # characters


def check_name(option: str, name: str) -> None:
    """Raise InvalidSetting unless this text can be the name of a batch or of a replay."""
    if not name.strip() or not name.isprintable():
        raise InvalidSetting(
            f"{option}: {name[:_MOST_SHOWN]!r} is no name; give printable text, such as 'prices were wrong in May'"
        )
    if (size := utf8_bytes(name)) > MAX_TEXT_BYTES:
        raise InvalidSetting(f"{option}: has {size:,} bytes in UTF-8; give a name of at most {MAX_TEXT_BYTES:,}")


def check_texts(**given: object) -> None:
    """Raise InvalidSetting for a lone surrogate in one of these texts, or in a sequence of texts.

    Py4J, which cannot send it, breaks the session's connection to the JVM instead of failing alone.
    """
    for option, value in given.items():
        for text in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidSetting(f"{option}: {text[:_MOST_SHOWN]!r} has a lone surrogate; give text in UTF-8")
