"""The checker: which promises a history breaks. Each rule is a function of the history alone.

lost        a committed message has no end                    early     it took effect before it was due
twice       it took effect twice, or has two ends             reply     an effect whose answer was not sent
ghost       an effect of a message that was never committed   schedule  an occurrence is missing, or ran twice
order       a key's effects are not in the order of commits   circuit   it is not closed, though all is well
stuck       work waits, though all is well                    owned     work or a node is left after the stop
process     a process did not end as it should
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.chaos.history import Effect, History
from tests.chaos.messages import ANSWERS, TICK_SECONDS

UNSENT_KINDS = {"tick"}
"""Kinds that no transaction of the application sends."""


class Violation(NamedTuple):
    """Violation of a promise, in a sentence."""

    rule: str
    text: str


Rule = Callable[[History], Iterator[str]]


def _lost(history: History) -> Iterator[str]:
    waiting = {row.id for row in history.waiting}
    for id in history.missing() - waiting:
        yield f"{history.sent[id]} was committed and is nowhere"


def _twice(history: History) -> Iterator[str]:
    effects = Counter(effect.id for effect in history.effects)
    yield from (f"{id} has {count} effects" for id, count in effects.items() if count > 1)
    yield from (f"{id} has an effect, and is a dead letter" for id in history.dead.keys() & effects.keys())
    yield from (f"{id} is {count} dead letters" for id, count in history.dead.items() if count > 1)
    ends = Counter[tuple[str, object]]()
    for (side, _, id), count in history.ended.items():
        ends[side, id] += count
    yield from (f"{id} has ended {count} times as {side}" for (side, id), count in ends.items() if count > 1)


def _ghost(history: History) -> Iterator[str]:
    for effect in history.effects:
        if effect.id not in history.sent and effect.kind not in UNSENT_KINDS:
            yield f"{effect} is of a message that was never committed"


def _order(history: History) -> Iterator[str]:
    """Effects are in the order in which handlers wrote them; handlers of one key run one after another."""
    last: dict[tuple[str, str], Effect] = {}
    for effect in history.effects:
        before = last.get((effect.kind, effect.key))
        if effect.key and before and effect.number < before.number:
            yield f"{effect.kind} {effect.key}: {effect.number} took effect after {before.number}"
        last[effect.kind, effect.key] = effect


def _early(history: History) -> Iterator[str]:
    for effect in history.effects:
        sent = history.sent.get(effect.id)
        if sent and sent.due_at and effect.at < sent.due_at:
            yield f"{sent} took effect at {effect.at}"


def _reply(history: History) -> Iterator[str]:
    answers = {(sent.key, sent.number) for sent in history.sent.values() if sent.kind == "receipt"}
    for effect in history.effects:
        sent = history.sent.get(effect.id)
        if sent and sent.kind == "order" and sent.behaviour == ANSWERS and (sent.key, sent.number) not in answers:
            yield f"{sent} took effect, and was not answered"


def _schedule(history: History) -> Iterator[str]:
    """Occurrences before the last one that took effect, but for those that still wait, are there once each."""
    ran = Counter(effect.number for effect in history.effects if effect.kind == "tick")
    yield from (f"the occurrence at {moment} ran {count} times" for moment, count in ran.items() if count > 1)
    if ran:
        missing = set(range(min(ran), max(ran), TICK_SECONDS)) - set(ran)
        waiting = sum(row.message_type == "chaos.tick" for row in history.waiting)
        dead = sum(id not in history.sent for id in history.dead)
        if len(missing) > waiting + dead:
            yield f"{len(missing)} occurrences did not run, and {waiting} wait: {sorted(missing)[:10]}"


def _stuck(history: History) -> Iterator[str]:
    yield from (str(row) for row in history.unfinished())


def _circuit(history: History) -> Iterator[str]:
    yield from history.circuits


def _owned(history: History) -> Iterator[str]:
    yield from (f"{row} has an owner" for row in history.waiting if row.owner_id)
    yield from (f"{node} is registered" for node in history.nodes)


def _process(history: History) -> Iterator[str]:
    yield from history.complaints


RULES: dict[str, Rule] = {
    "lost": _lost,
    "twice": _twice,
    "ghost": _ghost,
    "order": _order,
    "early": _early,
    "reply": _reply,
    "schedule": _schedule,
    "stuck": _stuck,
    "circuit": _circuit,
    "owned": _owned,
    "process": _process,
}


def check(history: History) -> list[Violation]:
    """Judge a history that was read after the nodes had stopped."""
    return [Violation(name, text) for name, rule in RULES.items() for text in sorted(rule(history))]
