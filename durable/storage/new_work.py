"""Contents of a NOTIFY: the lanes in which work without an owner was stored, or that it may be in any of them."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

_LONGEST: Final = 7_000  # bytes; Postgres takes less than 8,000
MOST: Final = 100  # message types, or destinations: each is a step of a claim, and a look finds many in one

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000, pattern=r"\A[^\x00-\x1f\x7f\ud800-\udfff]+\Z")]
"""Text that the columns of message types and destinations can hold: see durable.messages.validation."""
Lanes = Annotated[frozenset[Name], msgspec.Meta(max_length=MOST)]


class _Told(msgspec.Struct):
    types: Lanes
    destinations: Lanes


_READER: Final = msgspec.json.Decoder(_Told)


class NewWork(NamedTuple):
    """Lanes with new work: the types of messages in the inbox, and the destinations in the outbox."""

    message_types: frozenset[str] = frozenset()
    destinations: frozenset[str] = frozenset()
    is_anywhere: bool = False
    """True when a look for work has to find out."""

    def and_of(self, other: NewWork) -> NewWork:
        """Return the lanes of both; ANYWHERE when they are too many."""
        message_types, destinations = self.message_types | other.message_types, self.destinations | other.destinations
        is_anywhere = self.is_anywhere or other.is_anywhere or max(len(message_types), len(destinations)) > MOST
        return ANYWHERE if is_anywhere else NewWork(message_types, destinations)

    def payload(self) -> str:
        """Return the text for the NOTIFY, in JSON; '' where the lanes are not told, or are too many."""
        if self.is_anywhere or max(len(self.message_types), len(self.destinations)) > MOST:
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
