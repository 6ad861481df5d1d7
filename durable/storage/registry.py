"""The registry in the service's own database: providers of services, each until its lease is over, and singletons.

A row is of one service and one source: a node of this service, or a peer that has announced what it offers. The
database's clock decides whose lease is over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, timedelta
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Connection

from durable.envelope import NodeId
from durable.storage.database import channel
from durable.storage.sql import registry as statements
from durable.transports.frames import Listing, Offer, Signature

CHANGED: Final = "services"
"""Payload of the notification that the registry has changed."""

MOST_OFFERS: Final = 10_000
"""Offers that are read, at most."""
_DIGEST_BYTES: Final = 16

Signatures = Mapping[bytes, list[Signature]]
"""Methods of services by their digest."""


class StoredOffer(NamedTuple):
    """A row of `offers`. `node_id`: the own node that offers it; None: a peer."""

    source: str
    node_id: int | None
    listing: Listing
    digest: bytes
    lease: timedelta
    """Time until it is over."""


def source_of(node: NodeId) -> str:
    """Return the source of the offers of an own node."""
    return f"node {node}"


def write(
    conn: Connection,
    schema: str,
    source: str,
    listings: Sequence[Listing],
    *,
    lease: timedelta,
    node: NodeId | None = None,
) -> None:
    """Make these the offers of a source, for so long. `node`: the own node that it is, which must not be struck off."""
    params: dict[str, Any] = {
        "source": source,
        "node_id": node,
        "lease": lease,
        "services": [each.offer.service for each in listings],
        "applications": [each.application for each in listings],
        "nodes": [each.node for each in listings],
        "machines": [each.machine for each in listings],
        "versions": [each.offer.version for each in listings],
        "digests": [digest_of(each.offer) for each in listings],
        "signatures": [_written(each.offer) for each in listings],
        "addresses": [msgspec.json.encode(each.addresses).decode() for each in listings],
        "sinces": [each.since for each in listings],
        "loads": [each.load for each in listings],
        "singletons": [each.is_singleton for each in listings],
        "epochs": [each.epoch for each in listings],
    }
    conn.execute(statements.WRITE_OFFERS.within(schema), params)


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


def read(conn: Connection, schema: str, known: Signatures) -> list[StoredOffer]:
    """Return the offers whose lease is not over. Methods that are `known` by their digest are not read again."""
    rows = conn.execute(statements.READ_OFFERS.within(schema), {"most": MOST_OFFERS}).all()
    unknown = {bytes(row.digest) for row in rows} - known.keys()
    found = {**known, **(_read_signatures(conn, schema, unknown) if unknown else {})}
    return [
        StoredOffer(
            row.source,
            row.node_id,
            Listing(
                Offer(row.service, row.version, found[bytes(row.digest)]),
                row.application,
                row.node,
                list(row.addresses),
                row.since.astimezone(UTC),
                row.load,
                row.is_singleton,
                row.epoch,
                row.machine,
            ),
            bytes(row.digest),
            row.lease,
        )
        for row in rows
        if bytes(row.digest) in found  # gone between the two statements
    ]


def tell(conn: Connection, schema: str) -> None:
    """Tell the nodes that the registry has changed; in a transaction of its own."""
    conn.execute(statements.NOTIFY.within(schema), {"channel": channel(schema), "payload": CHANGED})


def digest_of(offer: Offer) -> bytes:
    """Return the digest of the methods of a service."""
    return hashlib.sha256(_written(offer).encode()).digest()[:_DIGEST_BYTES]


def _written(offer: Offer) -> str:
    """Return the methods as JSON; text that Postgres cannot hold is left out."""
    return msgspec.json.encode(offer.signatures).decode().replace("\\u0000", "")


def _read_signatures(conn: Connection, schema: str, digests: Collection[bytes]) -> dict[bytes, list[Signature]]:
    rows = conn.execute(statements.READ_SIGNATURES.within(schema), {"digests": list(digests)})
    return {bytes(row.digest): msgspec.json.decode(row.signatures, type=list[Signature]) for row in rows}
