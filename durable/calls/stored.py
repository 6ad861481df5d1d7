"""Listings as they are stored in the registry, and read from there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from durable.storage.registry import OfferRow, StoredOffer
from durable.transports.frames import Listing, Offer, Signature

Methods = Mapping[bytes, list[Signature]]
"""Methods of services by their digest."""

_DIGEST_BYTES: Final = 16
_read = msgspec.json.Decoder(list[Signature]).decode


def rows_of(listings: Iterable[Listing]) -> tuple[list[OfferRow], dict[bytes, str]]:
    """Return the rows of these listings, and their methods by digest."""
    rows: list[OfferRow] = []
    methods: dict[bytes, str] = {}
    for each in listings:
        text = msgspec.json.encode(each.offer.signatures).decode().replace("\\u0000", "")  # no jsonb can hold it
        digest = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
        methods[digest] = text
        rows.append(
            OfferRow(
                each.offer.service,
                each.offer.version,
                digest,
                each.application,
                each.node,
                each.machine,
                each.addresses,
                each.since,
                each.load,
                each.is_singleton,
                each.epoch,
            )
        )
    return rows, methods


def methods_of(stored: Mapping[bytes, str]) -> Methods:
    """Decode what was read of methods."""
    return {digest: _read(text) for digest, text in stored.items()}


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
