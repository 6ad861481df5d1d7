"""Registry: who offers which service where, as far as this process knows.

    own process     what this bus offers
    announced       what connected peers offer, in their own words
    own database    what the nodes of this service have written there, and the announcements at other nodes
    learned         what the connections to other services have told

Each source has its own listings, and none overwrites another's. Of two listings of one provider that of the nearer
source counts.

    declared --> expected --told, or its first attempt has failed--> known     calls wait for what is expected
    the bus stops ----> kept: connections end, and what they have told stays known to handlers and calls that drain
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from durable.transports.frames import Listing

Told = Callable[[], None]

MAX_SOURCES: Final = 1_000
MAX_LISTINGS: Final = 10_000
"""Listings of one source, at most; of those beyond, nothing is known."""


class Registry:
    """Listings of all sources. Its methods may be called in any thread."""

    def __init__(self, own: Callable[[], Sequence[Listing]] = tuple) -> None:
        """`own` returns the listings of this process."""
        self.generation = 0
        """Rises with each change."""
        self.is_used = False
        """True when somebody wants to know the providers: then they are read again and again."""
        self.looks = 0
        """Number of times that the own database was read, or could not be."""
        self.ask: Told | None = None
        """Has the own database read soon; None while nobody reads it."""
        self.own = own
        self.stored: Sequence[tuple[str, Listing]] = ()
        """Listings of the own database, each with who has written it. Another object after each change."""
        self._announced: dict[str, list[Listing]] = {}
        self._learned: dict[str, list[Listing]] = {}
        self._expected: set[str] = set()
        self._is_kept = False
        self._watching: dict[object, Told] = {}
        self._lock = threading.Lock()

    def listings(self) -> Sequence[Listing]:
        """Return the providers that are known now, those of this process first."""
        with self._lock:
            learned = list(self._learned.values())
        return _without_repeats([*self._local(), *learned])

    def local(self) -> Sequence[Listing]:
        """Return those of them that other services are told of: all but what was learned from other services."""
        return _without_repeats(self._local())

    def watch(self, told: Told) -> Callable[[], None]:
        """Call `told` after each change, in the thread that makes it. Returns what ends this."""
        key = object()
        with self._lock:
            self._watching[key] = told
        self.use()
        return lambda: self._watching.pop(key, None) and None

    def use(self) -> None:
        """Keep what is known of the own database up to date from now on."""
        if not self.is_used:
            self.is_used = True
            self.look_again()

    def look_again(self) -> None:
        """Ask for a new look at the own database, soon."""
        if self.ask is not None:
            self.ask()

    def store(self, rows: Sequence[tuple[str, Listing]]) -> None:
        """Take these as the listings of the own database, each with who has written it."""
        rows = tuple(rows[:MAX_LISTINGS])
        with self._lock:
            changed = self.stored != rows
            if changed:
                self.stored = rows
        if changed:
            self.tell()

    def learn(self, source: str, listings: Sequence[Listing]) -> None:
        """Take these as all that this connection has told. A source beyond MAX_SOURCES is not heard."""
        with self._lock:
            if source not in self._learned and len(self._learned) >= MAX_SOURCES:
                self.expect_no_more(source)
                return
            before = self._learned.get(source, [])
            self._learned[source] = list(listings[:MAX_LISTINGS])
            changed = before != self._learned[source]
        self.expect_no_more(source)
        if changed:
            self.tell()

    def expect(self, source: str) -> None:
        """Know that this connection is going to tell something."""
        self._expected.add(source)

    def expect_no_more(self, source: str) -> None:
        """Know that it may tell something, or not, at any time."""
        self._expected.discard(source)

    @property
    def is_learning(self) -> bool:
        """Tell whether a connection that is expected has told nothing yet."""
        return bool(self._expected)

    def learned(self, source: str) -> Sequence[Listing]:
        """Return what this connection has told."""
        with self._lock:
            return self._learned.get(source, ())

    def announce(self, source: str, listings: Sequence[Listing]) -> None:
        """Take these as all that this connected peer offers."""
        with self._lock:
            changed = self._announced.pop(source, None) != listings
            self._announced[source] = list(listings)
        if changed:
            self.tell()

    def keep(self) -> None:
        """Forget nothing any more: connections end because this process does, and what they have told is still so."""
        self._is_kept = True

    def forget(self, source: str) -> None:
        """Forget what this connection has told."""
        self.expect_no_more(source)
        if self._is_kept:
            return
        with self._lock:
            known = [self._learned.pop(source, None), self._announced.pop(source, None)]
        if any(known):
            self.tell()

    def tell(self) -> None:
        """Tell those that watch: something has changed."""
        with self._lock:
            self.generation += 1
            watching = list(self._watching.values())
        for told in watching:
            told()

    def _local(self) -> list[Sequence[Listing]]:
        with self._lock:
            newest_first = [*reversed(self._announced.values()), [listing for _, listing in self.stored]]
        return [self.own(), *newest_first]


def _without_repeats(sources: Sequence[Sequence[Listing]]) -> list[Listing]:
    """Return the listings, each provider as the first source has it."""
    found: dict[tuple[str, int, str], Listing] = {}
    for listings in sources:
        for listing in listings:
            found.setdefault((listing.application, listing.node, listing.offer.service), listing)
    return list(found.values())
