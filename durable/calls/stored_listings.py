"""Listings as they are stored in the registry, and read from there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from durable.storage.registry import OfferRow, StoredOffer
from durable.storage.rows import storable
from durable.transports.frames import Listing, Offer, Signature

Methods = Mapping[bytes, list[Signature]]
"""Methods of services by their digest."""

_DIGEST_BYTES: Final = 16
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC) + timedelta(days=2)  # within any zone of a connection
_LATEST: Final = datetime.max.replace(tzinfo=UTC) - timedelta(days=2)
_read = msgspec.json.Decoder(list[Signature]).decode


def rows_of(listings: Iterable[Listing]) -> tuple[list[OfferRow], dict[bytes, str]]:
    """Return the rows of these listings, one for each service, and their methods by digest.

    Characters and times that Postgres cannot hold are replaced before anything is encoded.
    """
    rows: dict[str, OfferRow] = {}
    methods: dict[bytes, str] = {}
    for each in listings:
        text = msgspec.json.encode([_storable(method) for method in each.offer.signatures]).decode()
        digest = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
        methods[digest] = text
        service = storable(each.offer.service)
        rows.setdefault(
            service,
            OfferRow(
                service,
                storable(each.offer.version),
                digest,
                storable(each.application),
                each.node,
                storable(each.machine),
                [storable(address) for address in each.addresses],
                _storable_time(each.since),
                each.load,
                each.is_singleton,
                each.epoch,
            ),
        )
    return list(rows.values()), methods


def loads_of(listings: Iterable[Listing]) -> dict[str, int]:
    """Return the loads of these listings, by their services as they are stored."""
    return {storable(each.offer.service): each.load for each in listings}


def methods_of(stored: Mapping[bytes, str]) -> Methods:
    """Decode what was read of methods; without those that are unreadable here."""
    methods: dict[bytes, list[Signature]] = {}
    for digest, text in stored.items():
        with suppress(msgspec.DecodeError):
            methods[digest] = _read(text)
    return methods


def listings_of(stored: Iterable[StoredOffer], methods: Methods) -> list[tuple[str, Listing]]:
    """Return the source and the listing of these rows; without those whose methods were gone when they were read."""
    return [(source, _listing(row, methods[row.digest])) for source, _, row, _ in stored if row.digest in methods]


def _listing(row: OfferRow, signatures: list[Signature]) -> Listing:
    return Listing(
        Offer(row.service, row.version, signatures),
        row.application,
        row.node,
        list(row.addresses),
        row.since,
        row.load,
        row.is_singleton,
        row.epoch,
        row.machine,
    )


def _storable(method: Signature) -> Signature:
    return Signature(storable(method.method), method.digest, storable(method.text))


def _storable_time(moment: datetime) -> datetime:
    return min(max(moment, _EARLIEST), _LATEST)
