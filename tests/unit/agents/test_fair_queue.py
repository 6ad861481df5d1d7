from __future__ import annotations

import random
from collections import defaultdict

import pytest

from durable.agents.buffer import Buffer
from durable.agents.fair_queue import FairQueue
from durable.envelope import Envelope, LeasedEnvelope, new_id
from tests.failure.leftovers import envelope


def lease(
    number: int, key: str | None = None, tenant: str = "", size: int = 1, interruptions: int = 0
) -> LeasedEnvelope:
    made = envelope(number)
    headers = {"tenant": tenant, "number": str(number)}
    whole = Envelope(
        **{name: getattr(made, name) for name in made.__struct_fields__}
        | {"id": new_id(), "headers": headers, "partition_key": key, "body": b"x" * size}
    )
    return LeasedEnvelope(whole, ordering_key=key, interruptions=interruptions)


def number(of: LeasedEnvelope) -> int:
    return int(of.envelope.headers["number"])


def numbers(batch: list[LeasedEnvelope]) -> list[int]:
    return [number(each) for each in batch]


def turns(**options: object) -> FairQueue:
    return FairQueue(1_000, 1 << 20, **options)  # type: ignore[arg-type]


def by_tenant(of: Envelope) -> str:
    return of.headers["tenant"]


def test_items_without_a_key_come_in_the_order_of_a_plain_buffer() -> None:
    plain: Buffer[LeasedEnvelope] = Buffer(1_000, 1 << 20)
    both = [plain, turns()]
    items = [lease(n, size=100 * n) for n in range(10)]
    for each in both:
        each.put(items)
    batches = [[numbers(each.take(4, 2_000)) for _ in range(4)] for each in both]
    assert batches[0] == batches[1]
    assert batches[0][0] == [0, 1, 2, 3]


def test_one_message_of_a_key_is_out_at_a_time_and_others_go_on() -> None:
    buffer = turns()
    buffer.put([lease(1, "a"), lease(2, "a"), lease(3, "b"), lease(4)])
    first = buffer.take(10, 1 << 20)
    assert sorted(numbers(first)) == [1, 3, 4]
    assert (buffer.take(10, 1 << 20), len(buffer), buffer.has_turn) == ([], 1, False)
    buffer.settled(first)
    assert numbers(buffer.take(10, 1 << 20)) == [2]


@pytest.mark.parametrize(
    ("items", "turn_count"),
    [
        ([lease(1), lease(2)], 2),
        ([lease(1, "a"), lease(2, "b")], 2),
        ([lease(1, "a"), lease(2, "a")], 1),
        ([lease(1, "a"), lease(2, tenant="t"), lease(3)], 3),
    ],
    ids=["without keys", "two keys", "one key", "each kind"],
)
def test_full_batch_waits_when_as_many_messages_have_their_turn(items: list[LeasedEnvelope], turn_count: int) -> None:
    buffer = turns(share_of=by_tenant)
    buffer.put(items)
    assert buffer.full_batch_waits(turn_count, 1 << 20)
    assert not buffer.full_batch_waits(turn_count + 1, 1 << 20)


def test_run_of_a_key_is_taken_together_up_to_the_allowed_length() -> None:
    buffer = turns(run=3)
    buffer.put([lease(n, "a") for n in range(5)])
    assert numbers(buffer.take(10, 1 << 20)) == [0, 1, 2]
    assert not buffer.has_turn


def test_a_run_ends_at_the_bytes_of_the_batch_but_holds_at_least_one() -> None:
    buffer = turns(run=10)
    buffer.put([lease(n, "a", size=1_000) for n in range(5)])
    taken = buffer.take(10, 3_000)
    assert numbers(taken) == [0, 1]
    buffer.settled(taken)
    assert numbers(buffer.take(10, 10)) == [2]


def test_item_too_large_for_the_rest_of_a_batch_waits_for_the_next() -> None:
    buffer = turns()
    buffer.put([lease(1, "a", size=1_000), lease(2, "b", size=1_000)])
    assert numbers(buffer.take(10, 2_000)) == [1]
    assert numbers(buffer.take(10, 2_000)) == [2]


def test_a_suspect_is_taken_alone() -> None:
    buffer = turns(run=10, alone=lambda each: each.interruptions >= 2)
    buffer.put([lease(1, "a"), lease(2, "a", interruptions=2), lease(3, "a"), lease(4, "a")])
    seen = []
    while taken := buffer.take(10, 1 << 20):
        seen.append(numbers(taken))
        buffer.settled(taken)
    assert seen == [[1], [2], [3, 4]]


def test_items_put_back_are_next_of_their_key() -> None:
    buffer = turns(run=2)
    buffer.put([lease(n, "a") for n in range(4)] + [lease(9)])
    taken = buffer.take(3, 1 << 20)
    buffer.put_back(taken)
    assert numbers([each for each in buffer.take(5, 1 << 20) if each.ordering_key is None]) == [9]
    buffer.settled(taken)
    assert numbers(buffer.take(5, 1 << 20)) == [0, 1]


def test_settled_returns_the_keys_without_waiting_items() -> None:
    buffer = turns()
    buffer.put([lease(1, "a"), lease(2, "a"), lease(3, "b"), lease(4)])
    assert buffer.settled(buffer.take(10, 1 << 20)) == {"b"}
    assert buffer.settled(buffer.take(10, 1 << 20)) == {"a"}


def test_withdrawn_items_of_a_key_are_gone_and_the_others_stay() -> None:
    buffer = turns()
    buffer.put([lease(1, "a"), lease(2, "a"), lease(3, "b"), lease(4)])
    taken = buffer.take(1, 1 << 20)
    taken += buffer.take(1, 1 << 20)
    assert numbers(buffer.withdraw({"a", "nobody"})) in ([2], [1, 2])
    buffer.settled(taken)
    left = numbers(buffer.take(10, 1 << 20))
    assert sorted(numbers(taken) + left) in ([1, 3, 4], [3, 4])
    assert len(buffer) == 0


def test_take_all_empties_the_queue() -> None:
    buffer = turns(share_of=by_tenant)
    items = [lease(1, "a"), lease(2, tenant="x"), lease(3)]
    buffer.put(items)
    assert sorted(numbers(buffer.waiting())) == [1, 2, 3]
    assert sorted(numbers(buffer.take_all())) == [1, 2, 3]
    assert (len(buffer), buffer.has_turn, buffer.take(1, 100)) == (0, False, [])


def test_first_returns_the_head_of_a_queue() -> None:
    buffer = turns(share_of=by_tenant)
    assert buffer.first is None
    buffer.put([lease(1, tenant="x"), lease(2, tenant="x")])
    assert buffer.first is not None
    assert number(buffer.first) == 1
    buffer.put([lease(3, "a"), lease(4, "a")])
    assert number(buffer.first) == 3


def test_tenants_take_turns_with_any_backlog() -> None:
    buffer = turns(share_of=by_tenant)
    buffer.put([lease(n, tenant="large") for n in range(500)])
    buffer.put([lease(1_000, tenant="small")])
    assert 1_000 in [number(buffer.take(1, 1 << 20)[0]) for _ in range(2)]


def test_a_tenant_has_as_many_messages_in_its_turn_as_its_weight_says() -> None:
    buffer = turns(share_of=by_tenant, weights={"gold": 3})
    buffer.put([lease(n, tenant=tenant) for n in range(20) for tenant in ("gold", "tin")])
    tenants = [each.envelope.headers["tenant"] for each in buffer.take(12, 1 << 20)]
    assert tenants == ["gold", "gold", "gold", "tin"] * 3


@pytest.mark.parametrize("seed", range(20))
def test_no_key_is_ever_out_twice_and_each_comes_in_its_order(seed: int) -> None:
    rng = random.Random(seed)
    buffer = turns(run=rng.choice([1, 3]), share_of=rng.choice([None, by_tenant]), weights={"x": 2})
    out: list[list[LeasedEnvelope]] = []
    seen: dict[str, list[int]] = defaultdict(list)
    put = 0
    for _ in range(600):
        match rng.choice(["put", "put", "take", "settle", "fail"]):
            case "put" if put < 300:
                put += 1
                key = rng.choice([None, *"abcd"])
                buffer.put([lease(put, key, rng.choice("xy"))])
            case "take":
                if taken := buffer.take(rng.randint(1, 5), 1 << 20):
                    keys = [{each.ordering_key for each in batch} - {None} for batch in [*out, taken]]
                    assert sum(map(len, keys)) == len(set().union(*keys)), "a key is out twice"
                    out.append(taken)
            case "settle" if out:
                done = out.pop(rng.randrange(len(out)))
                for each in done:
                    seen[each.ordering_key or "none"].append(number(each))
                buffer.settled(done)
            case "fail" if out:
                failed = out.pop(rng.randrange(len(out)))
                buffer.put_back(failed)
                buffer.settled(failed)
            case _:
                pass
    for done in out:
        for each in done:
            seen[each.ordering_key or "none"].append(number(each))
        buffer.settled(done)
    while taken := buffer.take(5, 1 << 20):
        for each in taken:
            seen[each.ordering_key or "none"].append(number(each))
        buffer.settled(taken)
    assert sum(map(len, seen.values())) == put
    assert all(seen[key] == sorted(seen[key]) for key in "abcd")
