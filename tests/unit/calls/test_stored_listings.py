"""Listings as rows: Postgres can store each of them, and nothing else of them is changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from durable.calls.stored_listings import listings_of, loads_of, methods_of, rows_of
from durable.storage.registry import StoredOffer
from durable.transports.frames import Listing, Offer, Signature

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(["\\", "\\\\", "u0000", "\\u0000", "\0", "\ud800", '"', "x"])).map("".join),
    st.text(st.characters(min_codepoint=0xD7FF, max_codepoint=0xE000)),
)
TIMES = st.one_of(
    st.datetimes(timezones=st.sampled_from([timezone(timedelta(hours=hours)) for hours in (-14, 0, 14)])),
    st.sampled_from([datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]),
)
STORABLE = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.lists(st.sampled_from(["\\", "\\\\", "u0000", "\\u0000", '"', "x", "\ue000"])).map("".join),
)


def listings(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Listing]:
    signatures = st.builds(Signature, texts, st.binary(max_size=16), texts)
    offers = st.builds(Offer, texts, texts, st.lists(signatures, max_size=3))
    addresses = st.lists(texts, max_size=3)
    return st.builds(Listing, offers, texts, st.integers(0, 2**63 - 1), addresses, TIMES, machine=texts)


def is_storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


@given(listings(TEXTS))
def test_any_listing_becomes_a_storable_row(given: Listing) -> None:
    (row,), methods = rows_of([given])
    (text,) = methods.values()
    signatures = msgspec.json.decode(text, type=list[Signature])
    told = [row.service, row.version, row.application, row.machine, *row.addresses]
    told += [part for each in signatures for part in (each.method, each.text)]
    assert [each for each in told if not is_storable(each)] == []
    for hours in (15, -15):
        assert row.since.astimezone(timezone(timedelta(hours=hours))) == row.since
    assert list(loads_of([given])) == [row.service]


@given(listings(STORABLE))
def test_storable_listing_comes_back_unchanged(given: Listing) -> None:
    rows, methods = rows_of([given])
    stored = [StoredOffer("x", None, row, timedelta()) for row in rows]
    ((source, back),) = listings_of(stored, methods_of(methods))
    assert source == "x"
    assert msgspec.structs.replace(back, since=given.since) == given


def test_unreadable_methods_leave_out_their_offer_alone() -> None:
    offers = [Offer(name, "1.0", [Signature(name, b"", name)]) for name in ("one", "other")]
    rows, methods = rows_of([Listing(each, "shop", 1, ["tcp://a:1"], SINCE) for each in offers])
    methods[rows[0].digest] = '[["one"]]'
    stored = [StoredOffer("x", None, row, timedelta()) for row in rows]
    assert [each.offer.service for _, each in listings_of(stored, methods_of(methods))] == ["other"]


def test_services_of_one_stored_name_are_one_row() -> None:
    offers = [Offer(name, "1.0", []) for name in ("a\0", "a\N{REPLACEMENT CHARACTER}")]
    rows, _ = rows_of([Listing(each, "shop", 1, ["tcp://a:1"], SINCE) for each in offers])
    assert len(rows) == 1
