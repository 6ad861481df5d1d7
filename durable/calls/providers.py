"""Providers as callers see them: who offers a service now, and which of them the next call goes to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from durable.calls import choice
from durable.calls.choice import HERE, Field, Origin
from durable.calls.contract import Contract
from durable.calls.links import Links
from durable.calls.places import Target, elsewhere, here, require_running
from durable.calls.provider import CallProvider
from durable.calls.registry import Registry
from durable.errors import CallFailed, IncompatibleService, NoProvider
from durable.transports.frames import Listing

CALLED: Final = ("tcp://", "unix://")
"""Beginnings of addresses that can be called."""
_RESTING: Final = 1.0  # seconds in which others are called instead of an address that has failed
_LONGEST_RESTING: Final = 16.0
_MOST_FAILED: Final = 1_000
_MOST_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Provider:
    """Provider of a service: see `Bus.providers()`, and the `at=` of `Bus.caller()`.

    `application`, `node`: whose process it is. `address`: where this process calls it; nothing when it cannot. `load`:
    calls that run or wait there, as last told. `epoch`: of the holder of a singleton; 0 for all others.
    """

    service: str
    application: str
    node: int
    version: str
    address: str
    since: datetime
    load: int = 0
    is_singleton: bool = False
    epoch: int = 0


class Providers:
    """Registry and connections that the callers of a bus share, and the failures of their earlier calls."""

    def __init__(
        self,
        registry: Registry,
        origin: Callable[[], Origin],
        *,
        links: Callable[[], Links | None],
        provider: Callable[[], CallProvider],
    ) -> None:
        self.registry = registry
        self.origin = origin
        self.links = links
        self.provider = provider
        self.under_way: Counter[tuple[str, int]] = Counter()
        self.turn = 0
        self._failed: dict[str, tuple[float, float]] = {}  # until when it rests, and for how long in all

    def of(self, service: str) -> list[Provider]:
        """Return the known providers of a service, by application and node."""
        origin = self.origin()
        listings = [each for each in self.registry.listings() if each.offer.service == service]
        return [
            shown(each, choice.address_of(each, origin, CALLED))
            for each in sorted(listings, key=lambda each: (each.application, each.node))
        ]

    def field(self, contract: Contract) -> Field:
        """Return the candidates for a contract."""
        return choice.field_of(
            contract.name,
            self.registry.listings(),
            self.origin(),
            difference=contract.difference,
            schemes=CALLED,
        )

    def has_failed(self, address: str) -> None:
        """Let the address rest; for twice as long when it fails again soon after the last time."""
        now = time.monotonic()
        until, rest = self._failed.get(address, (0.0, 0.0))
        if now < until:  # a call that began before
            return
        rest = min(2 * rest, _LONGEST_RESTING) if rest and now < until + rest else _RESTING
        if len(self._failed) >= _MOST_FAILED:
            self._failed = {each: (end, own) for each, (end, own) in self._failed.items() if now < end}
        self._failed[address] = now + rest, rest

    @property
    def failed(self) -> Collection[str]:
        """Addresses that have failed of late."""
        if not self._failed:
            return ()
        now = time.monotonic()
        self._failed = {each: (until, rest) for each, (until, rest) in self._failed.items() if now < until + rest}
        return [address for address, (until, _) in self._failed.items() if now < until]


class Anywhere:
    """The place of a caller that is told no address."""

    name = "any provider"
    is_choice = True

    def __init__(self, contract: Contract, providers: Callable[[], Providers]) -> None:
        self._contract = contract
        self._of = providers
        self._seen: tuple[Providers, int] | None = None
        self._field = Field((), (), is_singleton=False)
        self._targets: dict[tuple[str, int], Target] = {}

    @property
    def is_singleton(self) -> bool:
        return self._field.is_singleton

    @property
    def looks(self) -> int | None:
        registry = self._of().registry
        return None if registry.ask is None else registry.looks

    @property
    def is_learning(self) -> bool:
        return self._of().registry.is_learning

    def check(self) -> None:
        require_running(self._of().links, self.name)

    def choose(self, tried: Collection[str]) -> Target | None:
        providers = self._of()
        self._look(providers)
        providers.turn += 1
        chosen = choice.choose(
            self._field.candidates,
            under_way=providers.under_way,
            failed=providers.failed,
            tried=tried,
            turn=providers.turn,
        )
        if chosen is None:
            return None
        epoch = chosen.listing.epoch if chosen.listing.is_singleton else 0
        key = chosen.address, epoch
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = (
                here(providers.provider, providers.links, epoch)
                if chosen.address == HERE
                else elsewhere(chosen.address, providers.links, epoch, chosen.provider)
            )
        return target

    def left(self, tried: Collection[str]) -> int:
        candidates = self._field.candidates
        return sum(each.address not in tried for each in candidates) if tried else len(candidates)

    def nobody(self) -> CallFailed:
        """Return why there is none to choose."""
        name, misfits = self._contract.name, self._field.misfits
        if misfits and not self._field.candidates:
            told = "; ".join(misfits[:_MOST_SHOWN])
            return IncompatibleService(f"{self._contract.title}: {told}")
        if self._field.is_singleton:
            return NoProvider(f"service {name}: no node holds the singleton now")
        return NoProvider(f"service {name}: not offered by any provider that is known here")

    def begun(self, target: Target) -> None:
        if target.provider is not None:
            self._of().under_way[target.provider] += 1

    def ended(self, target: Target) -> None:
        if target.provider is None:
            return
        under_way = self._of().under_way
        under_way[target.provider] -= 1
        if under_way[target.provider] <= 0:
            del under_way[target.provider]

    def failed(self, target: Target) -> None:
        if target.name != HERE:
            self._of().has_failed(target.name)

    def look_again(self) -> None:
        self._seen = None
        self._of().registry.look_again()

    def _look(self, providers: Providers) -> None:
        seen = providers, providers.registry.generation
        if self._seen != seen:
            providers.registry.use()
            self._field = providers.field(self._contract)
            self._targets.clear()
            self._seen = seen


def shown(listing: Listing, address: str) -> Provider:
    """Return a listing as callers see it."""
    return Provider(
        listing.offer.service,
        listing.application,
        listing.node,
        listing.offer.version,
        address,
        listing.since,
        listing.load,
        listing.is_singleton,
        listing.epoch,
    )
