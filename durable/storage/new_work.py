"""Contents of a NOTIFY: the lanes in which work without an owner was stored, or that it may be in any of them."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

_LONGEST: Final = 7_000  # bytes; Postgres takes less than 8,000


class _Told(msgspec.Struct):
    types: frozenset[str]
    destinations: frozenset[str]


_READER: Final = msgspec.json.Decoder(_Told)


class NewWork(NamedTuple):
    """Lanes with new work: the types of messages in the inbox, and the destinations in the outbox."""

    message_types: frozenset[str] = frozenset()
    destinations: frozenset[str] = frozenset()
    is_anywhere: bool = False
    """True when a look for work has to find out."""

    def and_of(self, other: NewWork) -> NewWork:
        """Return the lanes of both."""
        if self.is_anywhere or other.is_anywhere:
            return ANYWHERE
        return NewWork(self.message_types | other.message_types, self.destinations | other.destinations)

    def payload(self) -> str:
        """Return the text for the NOTIFY, in JSON; '' where the lanes are not told, or are too many."""
        if self.is_anywhere:
            return ""
        told = msgspec.json.encode(_Told(self.message_types, self.destinations))
        return told.decode() if len(told) <= _LONGEST else ""

    @classmethod
    def of(cls, payload: str) -> NewWork:
        """Read the payload of a NOTIFY, of any version and of anybody who may send one."""
        try:
            told = _READER.decode(payload)
        except (msgspec.MsgspecError, RecursionError):
            return ANYWHERE
        return cls(told.types, told.destinations)


NOTHING: Final = NewWork()
ANYWHERE: Final = NewWork(is_anywhere=True)
