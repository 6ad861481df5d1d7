"""The choice of a provider: what is known of all in, one of them out.

1. Only providers whose version fits. Of a singleton, only the holder of the highest epoch.
2. Those that have just failed come last.
3. The same process comes before a Unix socket of the same machine, and that before all others.
4. Of these the least busy: by the load that it has told, and the calls of this process that it has not answered.
5. Of equals, one after another.

A provider has a candidate for each of its addresses: when one cannot be reached, the next one may be.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from durable.transports.frames import Listing, Offer
from durable.transports.hosts import host_in
from durable.transports.plaintext import is_loopback

HERE: Final = "this process"
"""Address of a provider in the caller's own process."""

_SOCKET: Final = "unix://"


class Distance(enum.IntEnum):
    PROCESS = 0
    MACHINE = 1
    ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Origin:
    """The process that calls, and the services that it offers. One elsewhere may have the same name and node."""

    application: str
    node: int
    machine: str
    offered: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A provider at one of its addresses."""

    listing: Listing
    address: str
    distance: Distance

    @property
    def provider(self) -> tuple[str, int]:
        return self.listing.application, self.listing.node


@dataclass(frozen=True, slots=True)
class Field:
    """All candidates that fit, and why the others do not. `is_singleton`: there is one holder at a time."""

    candidates: Sequence[Candidate]
    misfits: Sequence[str]
    is_singleton: bool


def field_of(
    service: str,
    listings: Sequence[Listing],
    caller: Origin,
    *,
    difference: Callable[[Offer], str],
    schemes: tuple[str, ...],
) -> Field:
    """Return the candidates for a service. `difference`: why an offer does not fit; `schemes`: what can be called."""
    named = [listing for listing in listings if listing.offer.service == service]
    newest = max((listing.epoch for listing in named if listing.is_singleton), default=0)
    candidates: list[Candidate] = []
    misfits: list[str] = []
    for listing in named:
        if reason := difference(listing.offer):
            misfits.append(f"node {listing.node} of {listing.application} offers {listing.offer.version}: {reason}")
        elif not listing.is_singleton or (listing.epoch == newest and newest):
            candidates += _candidates(listing, caller, schemes)
    return Field(candidates, misfits, any(listing.is_singleton for listing in named))


def choose(
    candidates: Sequence[Candidate],
    *,
    under_way: Mapping[tuple[str, int], int],
    failed: Collection[str] = (),
    tried: Collection[str] = (),
    turn: int = 0,
) -> Candidate | None:
    """Return the candidate to call; None when all were tried.

    `under_way`: this process's unanswered calls by provider. `failed`, `tried`: addresses that have failed of late, and
    those that this call has tried. `turn`: a number that rises with each choice.
    """
    left = [each for each in candidates if each.address not in tried]
    if len(left) < 2:
        return left[0] if left else None

    def cost(each: Candidate) -> tuple[bool, int, int]:
        return each.address in failed, each.distance, each.listing.load + under_way.get(each.provider, 0)

    costs = [cost(each) for each in left]
    least = min(costs)
    best = [each for each, own in zip(left, costs, strict=True) if own == least]
    return best[turn % len(best)]


def address_of(listing: Listing, caller: Origin, schemes: tuple[str, ...]) -> str:
    """Return the nearest address of a provider; nothing when there is none."""
    return next((each.address for each in sorted(_candidates(listing, caller, schemes), key=_distance)), "")


def _candidates(listing: Listing, caller: Origin, schemes: tuple[str, ...]) -> Iterator[Candidate]:
    is_offered = listing.offer.service in caller.offered  # if not, another process has the caller's name and node
    if (listing.application, listing.node) == (caller.application, caller.node) and is_offered:
        yield Candidate(listing, HERE, Distance.PROCESS)
        return
    is_near = bool(listing.machine) and listing.machine == caller.machine
    for address in listing.addresses:
        if address.startswith(_SOCKET):
            if is_near:
                yield Candidate(listing, address, Distance.MACHINE)
        elif address.startswith(schemes) and (is_near or not _is_loopback(address)):
            yield Candidate(listing, address, Distance.ELSEWHERE)


@lru_cache(maxsize=1_000)
def _is_loopback(address: str) -> bool:
    """Tell whether the address is the caller's own machine, whichever that is."""
    try:
        return is_loopback(host_in(urlsplit(address)))
    except ValueError:
        return False


def _distance(candidate: Candidate) -> Distance:
    return candidate.distance
