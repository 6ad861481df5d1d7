"""Listings that are kept after a gap."""

from __future__ import annotations

from datetime import UTC, datetime

from durable.calls.grace import Grace
from durable.transports.frames import Listing, Offer

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def listing(node: int, address: str = "", service: str = "who") -> Listing:
    return Listing(Offer(service, "1.0", []), "shop", node, [address or f"tcp://{node}:1"], NOW)


def grace() -> Grace[Listing]:
    return Grace(10, lambda each: each)


ONE, TWO, THREE = listing(1), listing(2), listing(3)


def test_told_listings_alone_are_known_without_a_gap() -> None:
    assert grace().merged([ONE], 0) == [ONE]


def test_listing_of_before_a_gap_is_kept_for_a_while() -> None:
    kept = grace()
    kept.begin([ONE, TWO], 100)
    assert kept.merged([THREE], 100) == [THREE, ONE, TWO]
    assert kept.merged([THREE], 109) == [THREE, ONE, TWO]
    assert kept.merged([THREE], 110) == [THREE]


def test_listing_told_again_is_no_longer_kept() -> None:
    kept = grace()
    kept.begin([ONE, TWO], 100)
    assert kept.merged([ONE], 101) == [ONE, TWO]
    assert kept.merged([], 102) == [TWO]  # the one was withdrawn since


def test_row_of_a_lost_node_is_kept_when_told_once_more() -> None:
    kept: Grace[Listing] = Grace(10, lambda each: each, outlasts_telling=True)
    kept.begin([ONE, TWO], 100)
    assert kept.merged([ONE], 101) == [ONE, TWO]
    assert kept.merged([], 102) == [ONE, TWO]
    again = listing(4, "tcp://1:1")
    assert kept.merged([again], 103) == [again, TWO]
    assert kept.merged([again], 110) == [again]


def test_gap_after_gap_keeps_nothing_for_ever() -> None:
    kept = grace()
    kept.begin([ONE], 100)
    assert kept.merged([], 101) == [ONE]
    kept.begin([ONE], 108)
    assert kept.merged([], 109) == [ONE]
    assert kept.merged([], 110) == []


def test_provider_under_another_number_at_the_same_address_is_not_kept_beside_itself() -> None:
    kept = grace()
    kept.begin([ONE, TWO], 100)
    again = listing(4, "tcp://1:1")
    assert kept.merged([again], 101) == [again, TWO]
    kept.begin([ONE], 100)
    other = listing(4, "tcp://1:1", "other")
    assert kept.merged([other], 101) == [other, ONE]
