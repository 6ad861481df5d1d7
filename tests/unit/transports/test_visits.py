"""Who gives way when a listener is full: never a known peer with work under way, and no newcomer among strangers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from durable.transports.visits import Visit, Visits


def visits(*, known: int = 2, strangers: int = 3, per_address: int = 100) -> Visits:
    return Visits(known=known, strangers=strangers, per_address=per_address)


def arrived(rooms: Visits, *addresses: str) -> list[Visit]:
    """Visits that arrive, for which none gives way."""
    found = [Visit(address) for address in addresses]
    assert [rooms.arrive(visit) for visit in found] == [None] * len(found)
    return found


def test_full_room_of_strangers_takes_a_newcomer_in_place_of_the_oldest() -> None:
    rooms = visits()
    first, *_ = arrived(rooms, "a", "b", "c")
    leaving = rooms.arrive(Visit("d"))
    assert leaving is not None
    assert leaving.visit is first


def test_address_with_the_most_strangers_gives_way() -> None:
    rooms = visits()
    _, crowd, _ = arrived(rooms, "good", "bad", "bad")
    leaving = rooms.arrive(Visit("other"))
    assert leaving is not None
    assert leaving.visit is crowd


def test_oldest_stranger_gives_way_with_half_a_request_under_way() -> None:
    rooms = visits()
    first, *_ = arrived(rooms, "a", "a", "a")
    first.is_idle = False
    leaving = rooms.arrive(Visit("a"))
    assert leaving is not None
    assert leaving.visit is first


def test_known_visit_does_not_count_among_strangers() -> None:
    rooms = visits(known=5, strangers=1)
    for _ in range(5):
        [visit] = arrived(rooms, "a")
        assert rooms.prove(visit) is None
        assert visit.is_known
    arrived(rooms, "a")


def test_full_room_of_the_known_takes_one_more_in_place_of_an_idle_one() -> None:
    rooms = visits()
    busy, idle, newcomer = arrived(rooms, "a", "a", "a")
    for visit in (busy, idle):
        rooms.prove(visit)
    busy.is_idle = False
    leaving = rooms.prove(newcomer)
    assert leaving is not None
    assert leaving.visit is idle
    assert newcomer.is_known


def test_newcomer_stays_a_stranger_when_all_the_known_are_busy() -> None:
    rooms = visits(known=1)
    busy, newcomer = arrived(rooms, "a", "a")
    rooms.prove(busy)
    busy.is_idle = False
    leaving = rooms.prove(newcomer)
    assert leaving is not None
    assert leaving.visit is newcomer
    assert not newcomer.is_known


def test_address_with_too_many_connections_loses_its_oldest_stranger() -> None:
    rooms = visits(strangers=100, per_address=2)
    first, _, _ = arrived(rooms, "a", "a", "b")
    leaving = rooms.arrive(Visit("a"))
    assert leaving is not None
    assert leaving.visit is first


def test_unix_socket_has_no_limit_per_address() -> None:
    rooms = visits(strangers=100, per_address=2)
    arrived(rooms, *[""] * 50)


@given(
    st.lists(
        st.tuples(st.sampled_from(["arrive", "prove", "leave", "work"]), st.integers(0, 30), st.sampled_from("abc")),
        max_size=120,
    )
)
def test_rooms_never_hold_more_than_they_may(steps: list[tuple[str, int, str]]) -> None:
    rooms = visits(known=3, strangers=4, per_address=5)
    inside: list[Visit] = []
    for step, number, address in steps:
        leaving = None
        visit = Visit(address) if step == "arrive" else inside[number % len(inside)] if inside else Visit(address)
        match step:
            case "arrive":
                inside.append(visit)
                leaving = rooms.arrive(visit)
            case "prove":
                leaving = rooms.prove(visit)
                assert leaving is None or leaving.visit is visit or leaving.visit.is_idle
            case "leave":
                rooms.leave(visit)
            case _:
                visit.is_idle = not visit.is_idle
        if leaving is not None:
            rooms.leave(leaving.visit)
        inside = [each for each in inside if each in rooms]
        assert len(inside) == len(rooms)
        assert sum(each.is_known for each in inside) <= 3
        assert sum(not each.is_known for each in inside) <= 4
        for each in "abc":
            assert sum(one.address == each for one in inside) <= 5
