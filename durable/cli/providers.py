"""Providers of services, as the registry in the application's database lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from durable.bus import Bus
from durable.calls import stored_listings
from durable.calls.contract import Contract
from durable.cli.output import Table, document_of
from durable.cli.target import schema_connection
from durable.errors import InvalidSetting, StorageUnavailable
from durable.listed import Listed
from durable.storage import registry
from durable.transports.frames import Offer


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider in the registry. `lease`: seconds until it is forgotten, unless it says that it is still there."""

    service: str
    application: str
    node: int
    version: str
    addresses: list[str]
    since: datetime
    load: int
    singleton: str
    epoch: int
    lease: float


@dataclass(frozen=True, slots=True)
class Registered:
    """The providers in the registry, or why it was not read: there may be no database."""

    providers: Sequence[Provider]
    offers: Sequence[Offer]
    unread: str | None = None

    def problem(self, contract: Contract) -> str | None:
        """Return why no provider serves this contract."""
        if self.unread is not None:
            return None
        found = [offer for offer in self.offers if offer.service == contract.name]
        differences = [f"{offer.version} is offered: {contract.difference(offer)}" for offer in found]
        if any(not contract.difference(offer) for offer in found):
            return None
        return "; ".join(dict.fromkeys(differences)) or "no provider is in the registry"

    def document(self, size: int) -> dict[str, Any]:
        listed = Listed.of([asdict(each) for each in self.providers], size)
        return {**document_of({"providers": listed}), "registry_unread": self.unread}

    def blocks(self, size: int) -> list[str | Table]:
        if self.unread:
            return [f"the registry was not read: {self.unread}"]
        if not self.providers:
            return []
        columns: dict[str, Any] = {
            "service": "service",
            "application": "application",
            "node": "node",
            "version": "version",
            "address": lambda each: " ".join(each.addresses) or "none",
            "since": "since",
            "load": "load",
            "singleton": "singleton",
            "lease": lambda each: f"{each.lease:.0f} s",
        }
        return [Table.of("providers", Listed.of(self.providers, size), columns)]


def registered(bus: Bus) -> Registered:
    """Read the registry of the application's database; without a database, there is none."""
    if bus.settings.database_url is None:
        return Registered([], [], "")
    try:
        with schema_connection(bus.settings) as conn:
            rows, methods = registry.read(conn, bus.settings.db_schema, ())
    except (StorageUnavailable, InvalidSetting) as error:
        return Registered([], [], str(error))
    providers = [
        Provider(
            row.service,
            row.application,
            row.node,
            row.version,
            list(row.addresses),
            row.since,
            row.load,
            ("held" if row.epoch else "waits") if row.is_singleton else "",
            row.epoch,
            lease.total_seconds(),
        )
        for _, _, row, lease in rows
    ]
    return Registered(
        providers, [each.offer for _, each in stored_listings.listings_of(rows, stored_listings.methods_of(methods))]
    )
