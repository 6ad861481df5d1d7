"""The rule that makes a receipt of the places of a message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import permutations
from uuid import UUID

import pytest

from durable.requests.receipts import receipt_of
from durable.storage.receipts import Standing

ID = UUID(int=17)
START = datetime(2030, 1, 1, tzinfo=UTC)


def standing(outcome: str, minute: int = 0, *, side: str = "incoming", address: str = "local") -> Standing:
    ended = None if outcome == "waiting" else START + timedelta(minutes=minute)
    return Standing(ID, side, address, "orders.placed", outcome, f"{outcome} {minute}", ended, 1)


def letter(outcome: str, minute: int) -> Standing:
    return standing(outcome, minute)._replace(is_letter=True)


LIVES: dict[str, tuple[list[Standing], str | None]] = {
    "nothing": ([], None),
    "waits": ([standing("waiting")], None),
    "handled": ([standing("handled")], "handled"),
    "given up, in both tables": ([letter("dead-lettered", 1), standing("dead-lettered", 1)], "dead-lettered"),
    "replayed": ([standing("dead-lettered", 1), letter("replayed", 2)], None),
    "replayed and waits": ([standing("dead-lettered", 1), letter("replayed", 2), standing("waiting")], None),
    "replayed and handled": (
        [standing("dead-lettered", 1), letter("replayed", 2), standing("handled", 3)],
        "handled",
    ),
    "replayed and given up again": (
        [standing("dead-lettered", 1), letter("replayed", 2), standing("dead-lettered", 3)],
        "dead-lettered",
    ),
    "replayed and expired": ([letter("replayed", 2), standing("expired", 3)], "expired"),
    "discarded": ([standing("dead-lettered", 1), letter("discarded", 2)], "discarded"),
    "cancelled, sent again, handled": ([standing("cancelled", 1), standing("handled", 2)], "handled"),
    "handled, then another body under its id": ([standing("handled", 1), letter("dead-lettered", 2)], "handled"),
    "handled, then another body, discarded": ([standing("handled", 1), letter("discarded", 2)], "handled"),
    "replayed letters of another message": (
        [standing("handled", 1), standing("dead-lettered", 2), letter("replayed", 3), standing("expired", 4)],
        "expired",
    ),
    "left, and handled here": (
        [standing("sent", 1, side="outgoing", address="tcp://a"), standing("handled", 2)],
        "sent",
    ),
    "left, and given up here": (
        [standing("sent", 1, side="outgoing", address="tcp://a"), standing("dead-lettered", 2)],
        "dead-lettered",
    ),
    "left for one, waits for another": (
        [standing("sent", 1, side="outgoing", address="tcp://a"), standing("waiting", side="outgoing", address="tcp://b")],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("first", ["handled", "sent", "expired", "cancelled", "dead-lettered"])
@pytest.mark.parametrize("second", ["handled", "sent", "expired", "cancelled", "dead-lettered", "discarded"])
def test_receipt_tells_the_end_of_the_second_message_under_one_id(first: str, second: str) -> None:
    life = [standing(first, 1), standing("dead-lettered" if second == "discarded" else second, 2)]
    if second == "dead-lettered":
        life.append(letter(second, 2))
    if second == "discarded":
        life.append(letter(second, 3))
    for standings in permutations(life):
        receipt = receipt_of(standings)
        assert receipt is not None
        assert receipt.outcome == second


@pytest.mark.parametrize(("life", "outcome"), LIVES.values(), ids=LIVES.keys())
def test_receipt_tells_the_end_of_a_life_in_any_order_of_rows(life: list[Standing], outcome: str | None) -> None:
    for standings in permutations(life):
        receipt = receipt_of(standings)
        assert (receipt and receipt.outcome) == outcome


def test_reason_of_a_receipt_comes_from_the_gravest_delivery() -> None:
    places = [standing("handled", 1), standing("dead-lettered", 2, side="outgoing", address="tcp://a")]
    receipt = receipt_of(places)
    assert receipt is not None
    assert receipt.reason == "dead-lettered 2"
    assert [each.outcome for each in receipt.deliveries] == ["handled", "dead-lettered"]
