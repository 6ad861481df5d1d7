"""Index of what is taken: addresses, processes and services of known providers, each found at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

from durable.errors import InvalidSetting
from durable.transports.announcements import is_local, place_of
from durable.transports.frames import Listing

Places = frozenset[str]

K = TypeVar("K")
V = TypeVar("V")


class Taken:
    """An index of listings. What is added several times is taken until it was taken out as often."""

    def __init__(self) -> None:
        self._owners: dict[str, Counter[str]] = {}  # of places
        self._processes: dict[tuple[str, int], Counter[Places]] = {}
        self._services: dict[str, Counter[tuple[str, bool]]] = {}  # by whom, and whether as a singleton

    def add(self, name: str, node: int, places: Places, listings: Iterable[Listing]) -> None:
        """Take in what one process offers, at these places."""
        for place in places:
            _add(self._owners, place, name)
        _add(self._processes, (name, node), places)
        for each in listings:
            _add(self._services, each.offer.service, (name, each.is_singleton))

    def take_out(self, name: str, node: int, places: Places, listings: Iterable[Listing]) -> None:
        """Undo one add()."""
        for place in places:
            _take_out(self._owners, place, name)
        _take_out(self._processes, (name, node), places)
        for each in listings:
            _take_out(self._services, each.offer.service, (name, each.is_singleton))

    def place_of_another(self, name: str, places: Places) -> tuple[str, str] | None:
        """Return one of these places that somebody of another name has, and that name."""
        return next(
            ((place, owner) for place in sorted(places) for owner in self._owners.get(place, ()) if owner != name),
            None,
        )

    def is_elsewhere(self, name: str, node: int, places: Places) -> bool:
        """Tell whether this process is known at other places."""
        return any(known != places for known in self._processes.get((name, node), ()))

    def is_apart(self, name: str, node: int, places: Places) -> bool:
        """Tell whether this process is known, and none of these is one of its places. A process that is connected to
        several nodes has told each the addresses that make sense there.
        """
        known: frozenset[str] = frozenset().union(*self._processes.get((name, node), ()))
        return bool(known) and known.isdisjoint(places)

    def singleton_of_another(self, name: str, listings: Iterable[Listing]) -> tuple[str, str] | None:
        """Return one of these services that somebody of another name offers, as a singleton there or here."""
        for each in listings:
            for owner, is_singleton in self._services.get(each.offer.service, ()):
                if owner != name and (is_singleton or each.is_singleton):
                    return each.offer.service, owner
        return None


def places_of(addresses: Iterable[str], hosts: Collection[str], *, is_here: bool = True) -> Places:
    """Return these addresses as they are compared. `is_here`: they are on this machine, whose names are `hosts`;
    without, those that are another place on each machine are left out.
    """
    return frozenset(place for each in addresses if (place := _place(each, frozenset(hosts), is_here)))


def by_process(listings: Sequence[Listing]) -> dict[tuple[str, int, str], list[Listing]]:
    """Return the listings of each process: its name, its node, its machine."""
    found: dict[tuple[str, int, str], list[Listing]] = {}
    for each in listings:
        found.setdefault((each.application, each.node, each.machine), []).append(each)
    return found


@lru_cache(maxsize=10_000)
def _place(address: str, hosts: frozenset[str], is_here: bool) -> str:
    with suppress(InvalidSetting):  # such as rabbitmq://
        if is_here or not is_local(address):
            return place_of(address, hosts)
    return ""


def _add(index: dict[K, Counter[V]], key: K, value: V) -> None:
    index.setdefault(key, Counter())[value] += 1


def _take_out(index: dict[K, Counter[V]], key: K, value: V) -> None:
    values = index[key]
    values[value] -= 1
    if values[value] <= 0:
        del values[value]
    if not values:
        del index[key]
