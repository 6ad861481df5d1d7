"""The checker can fail: every kind of broken promise is planted into a history that is right, and found."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from tests.chaos.checker import RULES, check
from tests.chaos.history import Effect, History, Sent, Waiting
from tests.chaos.messages import ANSWERS

START = datetime(2026, 1, 1, tzinfo=UTC)


def id_of(number: int) -> UUID:
    return UUID(int=number)


def sent(number: int, kind: str, *, key: str = "", of_key: int = 0, behaviour: str = "", delay: float = 0) -> Sent:
    due_at = START + timedelta(seconds=number + delay) if delay else None
    return Sent(id_of(number), kind, key, of_key, behaviour, due_at, None, START + timedelta(seconds=number))


def effect(of: Sent, position: int, *, after: float = 1) -> Effect:
    return Effect(of.id, of.kind, of.key, of.number, of.at + timedelta(seconds=after), position)


def tick(number: int, occurrence: int) -> Effect:
    return Effect(id_of(number), "tick", "", occurrence, START, number)


FIRST = sent(1, "order", key="a", of_key=1, behaviour=ANSWERS)
SECOND = sent(2, "order", key="a", of_key=2)
ANSWER = sent(3, "receipt", key="a", of_key=1)
LATER = sent(4, "reminder", delay=2)
OFFER = sent(5, "offer")
BROKEN = sent(6, "note")


def right() -> History:
    """A history in which nothing is wrong."""
    return History(
        sent={each.id: each for each in (FIRST, SECOND, ANSWER, LATER, OFFER, BROKEN)},
        effects=[
            effect(FIRST, 1),
            effect(SECOND, 2),
            effect(ANSWER, 3),
            effect(LATER, 4, after=2),
            *(tick(100 + number, 2 * number) for number in range(5)),
        ],
        dead={id_of(6): 1},  # type: ignore[arg-type]
        ended={("orders outgoing", "expired", id_of(5)): 1, ("orders outgoing", "sent", id_of(1)): 1},  # type: ignore[arg-type]
    )


def waiting(id: UUID, *, owner: int = 0) -> Waiting:
    return Waiting("billing", "incoming", id, "chaos.order", owner, "0 attempts")


def plant_loss(history: History) -> None:
    history.effects = [each for each in history.effects if each.id != LATER.id]


def plant_loss_of_a_dead_letter(history: History) -> None:
    del history.dead[BROKEN.id]


def plant_duplicate(history: History) -> None:
    history.effects.append(effect(SECOND, 9, after=3))


def plant_effect_of_a_dead_letter(history: History) -> None:
    history.effects.append(effect(BROKEN, 9))


def plant_second_letter(history: History) -> None:
    history.dead[BROKEN.id] = 2


def plant_second_end(history: History) -> None:
    history.ended["orders outgoing", "expired", FIRST.id] = 1


def plant_ghost(history: History) -> None:
    history.effects.append(effect(sent(9, "note"), 9))


def plant_inversion(history: History) -> None:
    history.effects[:2] = [effect(SECOND, 1, after=1), effect(FIRST, 2, after=3)]


def plant_early_effect(history: History) -> None:
    history.effects[3] = effect(LATER, 4, after=1.999)


def plant_missing_answer(history: History) -> None:
    del history.sent[ANSWER.id]
    history.effects = [each for each in history.effects if each.id != ANSWER.id]


def plant_missing_occurrence(history: History) -> None:
    history.effects = [each for each in history.effects if (each.kind, each.number) != ("tick", 4)]


def plant_second_occurrence(history: History) -> None:
    history.effects.append(tick(200, 4))


def plant_stuck_row(history: History) -> None:
    history.waiting.append(waiting(FIRST.id))


def plant_open_circuit(history: History) -> None:
    history.circuits.append("orders: destination tcp://127.0.0.1:1: no answer")


def plant_owned_row(history: History) -> None:
    history.waiting.append(waiting(FIRST.id, owner=3))


def plant_registered_node(history: History) -> None:
    history.nodes.append("billing host:17")


def plant_bad_end(history: History) -> None:
    history.complaints.append("orders/0 ended with 70 after SIGTERM")


PLANTED: list[tuple[Callable[[History], None], set[str]]] = [
    (plant_loss, {"lost"}),
    (plant_loss_of_a_dead_letter, {"lost"}),
    (plant_duplicate, {"twice"}),
    (plant_effect_of_a_dead_letter, {"twice"}),
    (plant_second_letter, {"twice"}),
    (plant_second_end, {"twice"}),
    (plant_ghost, {"ghost"}),
    (plant_inversion, {"order"}),
    (plant_early_effect, {"early"}),
    (plant_missing_answer, {"reply"}),
    (plant_missing_occurrence, {"schedule"}),
    (plant_second_occurrence, {"schedule"}),
    (plant_stuck_row, {"stuck"}),
    (plant_open_circuit, {"circuit"}),
    (plant_owned_row, {"stuck", "owned"}),
    (plant_registered_node, {"owned"}),
    (plant_bad_end, {"process"}),
]


def test_checker_finds_nothing_in_a_right_history() -> None:
    assert check(right()) == []


@pytest.mark.parametrize(("plant", "rules"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_checker_finds_each_planted_violation(plant: Callable[[History], None], rules: set[str]) -> None:
    history = right()
    plant(history)
    assert {violation.rule for violation in check(history)} == rules


def test_every_rule_has_a_planted_violation() -> None:
    assert set().union(*(rules for _, rules in PLANTED)) == set(RULES)


def test_waiting_row_is_stuck_and_not_lost() -> None:
    history = right()
    plant_loss(history)
    history.waiting.append(waiting(LATER.id))
    assert {violation.rule for violation in check(history)} == {"stuck"}


def test_waiting_occurrence_is_not_missing() -> None:
    history = right()
    plant_missing_occurrence(history)
    history.waiting.append(waiting(id_of(102))._replace(message_type="chaos.tick"))
    assert check(history) == []
