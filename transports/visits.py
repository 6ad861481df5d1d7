"""Visits: the connections of one listening socket, and the one that gives way when there is no room.

    STRANGER --proves who it is--> KNOWN

Strangers and known peers have rooms of their own, so that no number of strangers keeps a peer out. A full room of
strangers takes every newcomer all the same: the oldest visit of the address with the most strangers gives way. Silent
connections so displace each other, while a peer proves who it is within milliseconds. A full room of known peers takes
one more only in place of an idle connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

CLIENT: Final = "durable.client"
"""Key in the state of an HTTP request: the Client that it came from."""


class Client(Protocol):
    """Client at the other end of a connection, as an endpoint sees it."""

    @property
    def is_known(self) -> bool: ...

    def prove(self) -> None:
        """Say that the client has shown who it is."""
        ...


class Visit:
    """Connection from accept to close. `address` is empty on a Unix socket; `cut` closes it at once.

    An idle visit has nothing under way, so that it can be closed without harm.
    """

    __slots__ = ("address", "cut", "is_idle", "is_known", "is_over", "name")

    def __init__(self, address: str, cut: Callable[[], None] = lambda: None) -> None:
        self.address = address
        self.cut = cut
        self.name = "a stranger"
        self.is_known = False
        self.is_over = False
        self.is_idle = True


class GivesWay(NamedTuple):
    """The visit to close for want of room, and the reason."""

    visit: Visit
    reason: str


class Visits:
    """Rooms of one listening socket: what each may hold, and who is in it, the oldest first."""

    def __init__(self, *, known: int, strangers: int, per_address: int) -> None:
        self._most_known = known
        self._most_strangers = strangers
        self._per_address = per_address
        self._known: dict[Visit, None] = {}
        self._strangers: dict[Visit, None] = {}
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._known) + len(self._strangers)

    def __contains__(self, visit: object) -> bool:
        return visit in self._known or visit in self._strangers

    def arrive(self, visit: Visit) -> GivesWay | None:
        """Take in a stranger. Another visit may have to give way, or the new one itself."""
        self._strangers[visit] = None
        self._addresses[visit.address] += 1
        if visit.address and self._addresses[visit.address] > self._per_address:
            strangers, known = self._at(visit.address, self._strangers), self._at(visit.address, self._known)
            leaving = _oldest(strangers, but=visit) or _oldest_idle(known) or visit
            return GivesWay(leaving, "there are too many connections from its address (connections_per_address)")
        if len(self._strangers) > self._most_strangers:
            counts = Counter(each.address for each in self._strangers)
            most = max(counts.values())
            crowd = [each for each in self._strangers if counts[each.address] == most]
            leaving = _oldest(crowd, but=visit) or visit
            return GivesWay(leaving, "there are too many strangers (stranger_connections)")
        return None

    def prove(self, visit: Visit) -> GivesWay | None:
        """Move a stranger to the known. An idle one may have to give way; the visit itself stays a stranger then."""
        if visit.is_known or visit not in self._strangers:
            return None
        leaving = None
        if len(self._known) >= self._most_known:
            leaving = GivesWay(_oldest_idle(self._known) or visit, "there are too many connections")
        if leaving is None or leaving.visit is not visit:
            del self._strangers[visit]
            self._known[visit] = None
            visit.is_known = True
        return leaving

    def leave(self, visit: Visit) -> None:
        """Forget a visit that has ended."""
        if visit in self:
            self._known.pop(visit, None)
            self._strangers.pop(visit, None)
            self._addresses[visit.address] -= 1
            if not self._addresses[visit.address]:
                del self._addresses[visit.address]

    def least(self) -> Visit | None:
        """Return the visit whose end does the least harm: a stranger's, then an idle one."""
        return _oldest(self._strangers) or _oldest_idle(self._known)

    @staticmethod
    def _at(address: str, visits: Iterable[Visit]) -> list[Visit]:
        return [visit for visit in visits if visit.address == address]


def _oldest(visits: Iterable[Visit], but: Visit | None = None) -> Visit | None:
    """Return the oldest visit, idle or not: half a request would else keep a silent place for ever."""
    return next((visit for visit in visits if visit is not but), None)


def _oldest_idle(visits: Iterable[Visit]) -> Visit | None:
    return next((visit for visit in visits if visit.is_idle), None)
