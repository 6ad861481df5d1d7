"""What a process knows of providers, and of the singletons that it holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from durable.calls.registry import MAX_LISTINGS, MAX_SOURCES, Registry
from durable.calls.singletons import Holding, Singletons
from durable.transports.frames import Listing, Offer

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def listing(node: int, address: str, application: str = "shop", **facts: Any) -> Listing:
    return Listing(Offer("who", "1.0", []), application, node, [address], NOW, **facts)


def addresses(registry: Registry) -> list[str]:
    return [address for each in registry.listings() for address in each.addresses]


# ---------------------------------------------------------------- listings


def test_nearer_source_counts_and_none_overwrites_another() -> None:
    registry = Registry(lambda: [listing(1, "own")])
    registry.learn("a", [listing(1, "from a"), listing(2, "from a"), listing(3, "from a")])
    registry.learn("b", [listing(3, "from b"), listing(4, "from b")])
    registry.store([("node 1", listing(1, "stored")), ("node 2", listing(2, "stored"))])
    assert addresses(registry) == ["own", "stored", "from a", "from b"]
    registry.store([])
    assert addresses(registry) == ["own", "from a", "from a", "from b"]
    registry.forget("a")
    assert addresses(registry) == ["own", "from b", "from b"]


def test_source_stays_expected_until_told_or_forgotten() -> None:
    registry = Registry()
    ends: dict[str, Callable[[], None]] = {
        "told": lambda: registry.learn("a", []),
        "forgotten": lambda: registry.forget("a"),
        "not answered": lambda: registry.expect_no_more("a"),
    }
    for end in ends.values():
        registry.expect("a")
        assert registry.is_learning
        end()
        assert not registry.is_learning


def test_source_beyond_the_limit_is_not_expected_for_ever() -> None:
    registry = Registry()
    for number in range(MAX_SOURCES):
        registry.learn(str(number), [])
    registry.expect("one more")
    registry.learn("one more", [listing(1, "a")])
    assert not registry.is_learning


def test_kept_registry_forgets_no_source_and_hears_its_changes() -> None:
    registry = Registry()
    registry.learn("a", [listing(1, "learned")])
    registry.announce("b", [listing(2, "announced")])
    registry.keep()
    registry.forget("a")
    registry.forget("b")
    assert addresses(registry) == ["announced", "learned"]
    registry.announce("b", [])
    assert addresses(registry) == ["learned"]


def test_changes_are_told_and_sameness_is_not() -> None:
    registry, told = Registry(), []
    end = registry.watch(lambda: told.append(registry.generation))
    registry.learn("a", [listing(1, "x")])
    registry.learn("a", [listing(1, "x")])
    registry.forget("b")
    registry.store([])
    assert told == [1]
    registry.forget("a")
    assert told == [1, 2]
    end()
    registry.learn("a", [listing(1, "x")])
    assert told == [1, 2]


def test_learned_listings_have_bounds() -> None:
    registry = Registry()
    registry.learn("many", [listing(number, "x") for number in range(MAX_LISTINGS + 5)])
    assert len(registry.listings()) == MAX_LISTINGS
    registry.forget("many")
    for number in range(MAX_SOURCES + 5):
        registry.learn(str(number), [listing(number, "x")])
    assert len(registry.listings()) == MAX_SOURCES
    registry.learn("0", [listing(0, "y")])
    assert addresses(registry)[0] == "y"


# ---------------------------------------------------------------- singletons


def test_holder_is_sure_from_a_time_until_a_time() -> None:
    now = 10.0
    singletons = Singletons(lambda: now)
    assert singletons.epoch_of("who") == 0
    singletons.hold("who", Holding(3, 12.0, 15.0))
    assert (singletons.epoch_of("who"), singletons.known_epoch("who")) == (0, 3)
    now = 12.0
    assert singletons.epoch_of("who") == 3
    now = 15.0
    assert (singletons.epoch_of("who"), singletons.known_epoch("who")) == (0, 3)
    singletons.confirm("who", 20.0)
    assert singletons.epoch_of("who") == 3
    singletons.drop("who")
    singletons.confirm("who", 99.0)
    assert (singletons.epoch_of("who"), singletons.known_epoch("who")) == (0, 0)


def test_singletons_are_not_held_while_the_node_ends() -> None:
    singletons = Singletons(lambda: 10.0)
    told: list[int] = []
    singletons.on_change = lambda: told.append(singletons.known_epoch("who"))
    singletons.hold("who", Holding(3, 0.0, 99.0))
    singletons.close()
    singletons.hold("who", Holding(3, 0.0, 99.0))
    assert singletons.epoch_of("who") == 0
    singletons.open()
    singletons.hold("who", Holding(4, 0.0, 99.0))
    assert singletons.epoch_of("who") == 4
    assert told == [3, 0, 0, 4]
