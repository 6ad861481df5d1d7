"""The registry in the service's own database: providers of services, each until its lease is over, and singletons.

A row is of one service and one source: a node of this service, or a peer that has announced what it offers. The
database's clock decides whose lease is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, StatementError

from durable.envelope import NodeId
from durable.storage.database import channel
from durable.storage.outages import described, is_passing
from durable.storage.sql import registry as statements

CHANGED: Final = "services"
"""Payload of the notification that the registry has changed."""

MOST_OFFERS: Final = 10_000
"""Offers that are read, at most."""

_TRIAL: Final = "trial"


class OfferRow(NamedTuple):
    """A service that somebody offers. `digest` is that of its methods, which are written beside it once."""

    service: str
    version: str
    digest: bytes
    application: str
    node: int
    machine: str
    addresses: Sequence[str]
    since: datetime
    load: int
    is_singleton: bool
    epoch: int


class StoredOffer(NamedTuple):
    """An offer of a source. `node_id`: the own node that it is; None: a peer. `lease`: time until it is over."""

    source: str
    node_id: int | None
    offer: OfferRow
    lease: timedelta


def source_of(node: NodeId) -> str:
    """Return the source of the offers of an own node."""
    return f"node {node}"


def write(
    conn: Connection,
    schema: str,
    source: str,
    offers: Sequence[OfferRow],
    signatures: Mapping[bytes, str],
    *,
    lease: timedelta,
    node: NodeId | None = None,
) -> None:
    """Make these the offers of a source, for so long. `signatures`: methods by their digest, in JSON. `node`: the own
    node that it is; one that was struck off writes nothing.
    """
    params: dict[str, Any] = {
        "source": source,
        "node_id": node,
        "lease": lease,
        "services": [each.service for each in offers],
        "applications": [each.application for each in offers],
        "nodes": [each.node for each in offers],
        "machines": [each.machine for each in offers],
        "versions": [each.version for each in offers],
        "digests": [each.digest for each in offers],
        "signatures": [signatures[each.digest] for each in offers],
        "addresses": [msgspec.json.encode(each.addresses).decode() for each in offers],
        "sinces": [each.since for each in offers],
        "loads": [each.load for each in offers],
        "singletons": [each.is_singleton for each in offers],
        "epochs": [each.epoch for each in offers],
    }
    conn.execute(statements.WRITE_OFFERS.within(schema), params)


def refused(
    conn: Connection, schema: str, offers: Sequence[OfferRow], signatures: Mapping[bytes, str]
) -> dict[str, str]:
    """Try each of these alone, and write nothing. Return the services that the database refuses, and its reasons."""
    reasons: dict[str, str] = {}
    for each in offers:
        trial = conn.begin_nested()
        try:
            write(conn, schema, _TRIAL, [each], signatures, lease=timedelta())
        except (StatementError, UnicodeError) as error:
            if isinstance(error, DBAPIError) and is_passing(error):
                raise
            reasons[each.service] = described(error)
        trial.rollback()
    return reasons


def renew(conn: Connection, schema: str, source: str, loads: Mapping[str, int], *, lease: timedelta) -> int:
    """Lengthen the leases of a source, and say how busy each service is. Returns the number of rows there are."""
    params = {"source": source, "services": list(loads), "loads": list(loads.values()), "lease": lease}
    return conn.execute(statements.RENEW_OFFERS.within(schema), params).rowcount


def remove(conn: Connection, schema: str, source: str) -> None:
    """Remove all offers of a source."""
    conn.execute(statements.REMOVE_OFFERS.within(schema), {"source": source})


def sweep(conn: Connection, schema: str, most: int) -> list[str]:
    """Remove offers whose lease is over, the oldest first. Returns their sources."""
    return list(conn.execute(statements.SWEEP_OFFERS.within(schema), {"most": most}).scalars())


def read(conn: Connection, schema: str, known: Collection[bytes]) -> tuple[list[StoredOffer], dict[bytes, str]]:
    """Return the offers whose lease is not over, and the methods by their digest, in JSON, unless it is `known`."""
    rows = conn.execute(statements.READ_OFFERS.within(schema), {"most": MOST_OFFERS}).all()
    offers = [
        StoredOffer(
            row.source,
            row.node_id,
            OfferRow(
                row.service,
                row.version,
                bytes(row.digest),
                row.application,
                row.node,
                row.machine,
                list(row.addresses),
                row.since.astimezone(UTC),
                row.load,
                row.is_singleton,
                row.epoch,
            ),
            row.lease,
        )
        for row in rows
    ]
    unknown = {each.offer.digest for each in offers}.difference(known)
    return offers, _read_signatures(conn, schema, unknown) if unknown else {}


def own_addresses(conn: Connection, schema: str) -> list[str]:
    """Return the addresses of the own nodes that offer services, also of those whose lease is over."""
    return list(conn.execute(statements.READ_OWN_ADDRESSES.within(schema), {"most": MOST_OFFERS}).scalars())


def tell(conn: Connection, schema: str) -> None:
    """Tell the nodes that the registry has changed; in a transaction of its own."""
    conn.execute(statements.NOTIFY.within(schema), {"channel": channel(schema), "payload": CHANGED})


def _read_signatures(conn: Connection, schema: str, digests: Collection[bytes]) -> dict[bytes, str]:
    rows = conn.execute(statements.READ_SIGNATURES.within(schema), {"digests": list(digests)})
    return {bytes(row.digest): row.signatures for row in rows}
