"""Listings that were known before a gap, and are not told after it: they are kept for a while.

A hub that was restarted knows a peer when that has announced again, and of a database that was away the rows of all
nodes are elapsed. Both say little about the providers, which may have been there all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from durable.transports.frames import Listing

T = TypeVar("T")

Key = tuple[str, int, str]

_MOST: Final = 10_000


class Grace(Generic[T]):
    """`listing` returns the listing of an item. Each item is kept for so many seconds after a gap.

    `outlasts_telling`: also one that was told meanwhile, as by the row that a lost node has left. By default that ends
    the grace: when it is not told later, it was withdrawn.
    """

    def __init__(self, seconds: float, listing: Callable[[T], Listing], *, outlasts_telling: bool = False) -> None:
        self._seconds = seconds
        self._listing = listing
        self._outlasts_telling = outlasts_telling
        self._kept: dict[Key, tuple[T, float]] = {}

    def begin(self, known: Sequence[T], now: float) -> None:
        """Keep what was known before the gap that has ended; what was kept after an earlier one, for no longer."""
        ends_at = now + self._seconds
        before = {key: until for key, (_, until) in self._kept.items()}
        self._kept = {
            key: (each, before.get(key, ends_at)) for each in known[:_MOST] for key in [_key(self._listing(each))]
        }

    def merged(self, told: Sequence[T], now: float) -> list[T]:
        """Return what is told, and what is kept beside it. A provider that is told under another number, at an address
        of one that is kept, is the same.
        """
        if not self._kept:
            return list(told)
        listings = [self._listing(each) for each in told]
        keys = {_key(each) for each in listings}
        at = {(each.application, each.offer.service, address) for each in listings for address in each.addresses}

        def is_kept(key: Key, listing: Listing) -> bool:
            if key in keys:
                return self._outlasts_telling
            return not any((key[0], key[2], address) in at for address in listing.addresses)

        self._kept = {
            key: (each, until)
            for key, (each, until) in self._kept.items()
            if now < until and is_kept(key, self._listing(each))
        }
        return [*told, *(each for key, (each, _) in self._kept.items() if key not in keys)]


def _key(listing: Listing) -> Key:
    return listing.application, listing.node, listing.offer.service
