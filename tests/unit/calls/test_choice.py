"""Choosing a provider: facts in, one candidate out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.calls.choice import HERE, Candidate, Distance, Field, Origin, address_of, choose, field_of
from durable.transports.frames import Listing, Offer

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CALLER = Origin("shop", 7, "machine", frozenset({"who"}))
SCHEMES = ("tcp://", "unix://")


def listing(node: int, *addresses: str, version: str = "1.0", application: str = "shop", **facts: Any) -> Listing:
    facts = {"machine": "machine", **facts}
    return Listing(Offer("who", version, []), application, node, list(addresses), NOW, **facts)


def difference(offer: Offer) -> str:
    return "" if offer.version == "1.0" else "another version"


def field(*listings: Listing) -> Field:
    return field_of("who", listings, CALLER, difference=difference, schemes=SCHEMES)


def addresses(*listings: Listing) -> list[str]:
    return [each.address for each in field(*listings).candidates]


def chosen(*listings: Listing, **facts: Any) -> str | None:
    candidate = choose(field(*listings).candidates, **{"under_way": {}, **facts})
    return None if candidate is None else candidate.address


# ---------------------------------------------------------------- who may be called


def test_namesake_elsewhere_is_not_this_process() -> None:
    caller = Origin("shop", 7, "machine")  # which offers nothing
    found = field_of("who", [listing(7, "tcp://a:1")], caller, difference=difference, schemes=SCHEMES)
    assert [each.address for each in found.candidates] == ["tcp://a:1"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (listing(7, "tcp://a:1"), [HERE]),
        (listing(7, "tcp://a:1", application="other"), ["tcp://a:1"]),
        (listing(1, "tcp://a:1", "unix:///s"), ["tcp://a:1", "unix:///s"]),
        (listing(1, "tcp://a:1", "unix:///s", machine="other"), ["tcp://a:1"]),
        (listing(1, "unix:///s", machine=""), []),
        (listing(1, "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1"), None),
        (listing(1, "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost.:1", machine="other"), []),
        (listing(1, "rabbitmq://default/queue/q"), []),
        (listing(1), []),
        (listing(1, "tcp://a:1", version="2.0"), []),
        (Listing(Offer("other", "1.0", []), "shop", 1, ["tcp://a:1"], NOW), []),
    ],
)
def test_addresses_within_reach_are_candidates(listed: Listing, expected: list[str] | None) -> None:
    assert addresses(listed) == (listed.addresses if expected is None else expected)


def test_misfits_are_told() -> None:
    found = field(listing(1, "tcp://a:1", version="2.0"), listing(2, "tcp://b:1"))
    assert found.misfits == ["node 1 of shop offers 2.0: another version"]
    assert [each.address for each in found.candidates] == ["tcp://b:1"]


def test_newest_holder_of_a_singleton_is_the_only_candidate() -> None:
    held: dict[str, Any] = {"is_singleton": True}
    found = field(
        listing(1, "tcp://a:1", epoch=3, **held),
        listing(2, "tcp://b:1", epoch=4, **held),
        listing(3, "tcp://c:1", epoch=0, **held),
    )
    assert ([each.address for each in found.candidates], found.is_singleton) == (["tcp://b:1"], True)
    assert field(listing(3, "tcp://c:1", epoch=0, **held)).candidates == []


# ---------------------------------------------------------------- which one is called


def test_nearest_is_chosen_before_the_least_busy() -> None:
    far, near, own = listing(1, "tcp://a:1"), listing(2, "unix:///s", load=50), listing(7, load=90)
    assert chosen(far, near, own) == HERE
    assert chosen(far, near) == "unix:///s"
    assert chosen(far, near, tried=["unix:///s"]) == "tcp://a:1"
    assert chosen(far, near, failed=["unix:///s"]) == "tcp://a:1"
    assert chosen(near, failed=["unix:///s"]) == "unix:///s"
    assert chosen(far, near, tried=["unix:///s", "tcp://a:1"]) is None


def test_calls_under_way_count_as_load() -> None:
    one, other = listing(1, "tcp://a:1", load=2), listing(2, "tcp://b:1", load=1)
    assert chosen(one, other) == "tcp://b:1"
    assert chosen(one, other, under_way={("shop", 2): 2}) == "tcp://a:1"


def test_equals_take_turns() -> None:
    equals = [listing(node, f"tcp://a:{node}") for node in range(1, 4)]
    assert len({chosen(*equals, turn=turn) for turn in range(3)}) == 3


def test_address_of_a_provider_is_its_nearest() -> None:
    assert address_of(listing(1, "tcp://a:1", "unix:///s"), CALLER, SCHEMES) == "unix:///s"
    assert address_of(listing(1, "unix:///s", machine="other"), CALLER, SCHEMES) == ""


known = st.builds(
    Candidate,
    listing=st.builds(listing, st.integers(1, 4), load=st.integers(0, 3)),
    address=st.sampled_from([f"tcp://a:{port}" for port in range(5)]),
    distance=st.sampled_from(Distance),
)
some = st.sets(st.sampled_from([f"tcp://a:{port}" for port in range(5)]))


@given(
    st.lists(known, max_size=6),
    some,
    some,
    st.integers(0, 9),
    st.dictionaries(st.tuples(st.just("shop"), st.integers(1, 4)), st.integers(0, 3)),
)
def test_choice_is_never_worse_than_another(
    candidates: list[Candidate], failed: set[str], tried: set[str], turn: int, under_way: dict[tuple[str, int], int]
) -> None:
    def cost(each: Candidate) -> tuple[bool, int, int]:
        return each.address in failed, each.distance, each.listing.load + under_way.get(each.provider, 0)

    best = choose(candidates, under_way=under_way, failed=failed, tried=tried, turn=turn)
    left = [each for each in candidates if each.address not in tried]
    assert (best is None) == (not left)
    if best is not None:
        assert best in left
        assert cost(best) == min(map(cost, left))
