"""Everything that writes a row of `circuits`, after everything else that does: the operator has the last word.

The same steps are done to Postgres and to the circuits of a bus in memory, which must agree. Time passes by moving the
rows back, or the clock of the bus in memory ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, create_engine, text

from durable.agents.settling import pause_and_release
from durable.application.retry import Pause
from durable.clock import Clock
from durable.envelope import Envelope, LeasedEnvelope, NodeId, new_id
from durable.storage import circuits
from durable.storage.circuits import CircuitKind, OpenCircuit, Resumed
from durable.testing import ManualClock
from durable.testing.circuits import MemoryCircuit, MemoryCircuits
from durable.testing.mailbox import Mailbox
from tests.support.tables import Tables

SCHEMA = "durable"
NODE = NodeId(1)
TYPE = "circuits.placed"
HOUR = timedelta(hours=1)
NEAR = timedelta(minutes=5)
LEASE = 2 * HOUR


class Step(NamedTuple):
    """Somebody who writes, and for how many hours; None: until a resume."""

    name: str
    hours: int | None = None

    @property
    def time(self) -> timedelta | None:
        return None if self.hours is None else self.hours * HOUR

    @property
    def is_operators(self) -> bool:
        return self.name in ("operator pauses", "operator resumes")


STEPS = [
    *(Step("operator pauses", hours) for hours in (None, 1, 6)),
    Step("operator resumes"),
    *(Step("code pauses", hours) for hours in (None, 1, 9)),
    *(Step("error says when to come back", hours) for hours in (1, 9)),
    *(Step("breaker opens", hours) for hours in (1, 9)),
    Step("destination latches"),
    Step("something gets through"),
    Step("trial begins"),
    Step("trial fails"),
    Step("trial tells nothing"),
    Step("ended rows are removed"),
    *(Step("time passes", hours) for hours in (2, 4)),
]


def lease() -> LeasedEnvelope:
    body = Envelope(
        id=new_id(),
        message_type=TYPE,
        destination="local",
        source="shop",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime(2026, 1, 1).astimezone(),
    )
    return LeasedEnvelope(body, endpoint="local")


def write(step: Step, conn: Connection) -> None:
    """Do it to Postgres, as the agents and the operator do it."""
    named = {"reason": step.name, "actor": "test"}
    match step.name:
        case "operator pauses":
            circuits.pause(conn, SCHEMA, CircuitKind.HANDLER, TYPE, duration=step.time, **named)
        case "operator resumes":
            circuits.resume(conn, SCHEMA, CircuitKind.HANDLER, TYPE)
        case "code pauses":
            circuits.pause_at_least(conn, SCHEMA, CircuitKind.HANDLER, TYPE, duration=step.time, **named)
        case "error says when to come back":
            assert step.time is not None
            pause_and_release(conn, SCHEMA, NODE, TYPE, lease(), Pause(step.time, step.name))
        case "breaker opens" | "destination latches":
            circuits.open_circuit(conn, SCHEMA, CircuitKind.HANDLER, TYPE, duration=step.time, **named)
        case "something gets through":
            circuits.close_circuit(conn, SCHEMA, CircuitKind.HANDLER, TYPE)
        case "trial begins":
            circuits.begin_trial(conn, SCHEMA, TYPE, lease=LEASE)
        case "trial fails":
            circuits.put_off_probe(conn, SCHEMA, TYPE, reason=step.name, shortest=HOUR, longest=3 * HOUR)
        case "trial tells nothing":
            circuits.try_again(conn, SCHEMA, TYPE)
        case "ended rows are removed":
            circuits.close_ended(conn, SCHEMA)
        case "time passes":
            moved = "UPDATE durable.circuits SET since = since - :by, until = until - :by"
            conn.execute(text(moved), {"by": step.time})
        case _:
            raise AssertionError(step)


def write_in_memory(step: Step, mailbox: Mailbox, clock: ManualClock) -> None:
    rows, named = mailbox.circuits, {"reason": step.name, "actor": "test"}
    match step.name:
        case "operator pauses":
            rows.pause(CircuitKind.HANDLER, TYPE, duration=step.time, **named)
        case "operator resumes":
            rows.resume(CircuitKind.HANDLER, TYPE)
        case "code pauses":
            rows.pause_at_least(CircuitKind.HANDLER, TYPE, duration=step.time, **named)
        case "error says when to come back":
            assert step.time is not None
            waiting = lease()
            mailbox.send(waiting.envelope)
            mailbox.pause_and_release(NODE, TYPE, waiting, Pause(step.time, step.name))
        case "breaker opens" | "destination latches":
            rows.open_circuit(CircuitKind.HANDLER, TYPE, duration=step.time, **named)
        case "something gets through":
            rows.close_circuit(CircuitKind.HANDLER, TYPE)
        case "trial begins":
            found = rows.of(CircuitKind.HANDLER, TYPE)
            if found is not None and found.is_tried(clock.now()):
                found.until = clock.now() + LEASE
        case "trial fails":
            rows.put_off_probe(TYPE, reason=step.name, shortest=HOUR, longest=3 * HOUR)
        case "trial tells nothing":
            rows.try_again(TYPE)
        case "time passes":
            assert step.time is not None
            clock.advance(step.time)
        case "ended rows are removed":
            pass  # they are, whenever one is looked for
        case _:
            raise AssertionError(step)


class Word:
    """What the operator has said last, and how much of its time is left."""

    def __init__(self) -> None:
        self.pauses = False
        self.left: timedelta | None = None

    def hear(self, step: Step) -> None:
        if step.is_operators:
            self.pauses = step.name == "operator pauses"
            self.left = step.time
        elif step.name == "time passes" and step.time is not None and self.left is not None:
            self.left -= step.time
            self.pauses = self.pauses and self.left > timedelta(0)

    def check(self, found: OpenCircuit | None, now: datetime) -> None:
        if self.pauses:
            assert found is not None
            assert not found.probing
            assert found.until is None or (self.left is not None and found.until >= now + self.left - NEAR)


@pytest.fixture(scope="module")
def engine(shared: Tables) -> Iterator[Engine]:
    engine = create_engine(shared.url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def check(engine: Engine, steps: list[Step]) -> None:
    word, clock = Word(), ManualClock()
    mailbox = Mailbox(clock)
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM durable.circuits"))
    for step in steps:
        with engine.begin() as conn:
            write(step, conn)
        write_in_memory(step, mailbox, clock)
        word.hear(step)
        with engine.begin() as conn:
            found = next(iter(circuits.read(conn, SCHEMA)), None)
            now = conn.execute(text("SELECT now()")).scalar_one()
        word.check(found, now)
        assert_alike(found, now, mailbox.circuits.of(CircuitKind.HANDLER, TYPE), clock)


def assert_alike(found: OpenCircuit | None, now: datetime, in_memory: MemoryCircuit | None, clock: Clock) -> None:
    if found is None or in_memory is None:
        assert found is None
        assert in_memory is None
        return
    assert found.probing == in_memory.probing
    for one, other in ((found.since, in_memory.since), (found.until, in_memory.until)):
        if one is None or other is None:
            assert one is None
            assert other is None
        else:
            assert abs((one - now) - (other - clock.now())) < NEAR


@pytest.mark.parametrize("before", STEPS, ids=lambda step: f"{step.name} {step.hours or ''}".strip())
def test_pause_by_an_operator_holds_against_each_pair_of_writers(engine: Engine, before: Step) -> None:
    for pause, after in product((None, 6), STEPS):
        check(engine, [before, Step("operator pauses", pause), after])
        check(engine, [Step("operator pauses", pause), before, after])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=12))
def test_pause_by_an_operator_holds_through_any_steps(engine: Engine, steps: list[Step]) -> None:
    check(engine, steps)


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [
        (1, 9, "code pauses"),
        (9, 1, "operator pauses"),
        (1, None, "code pauses"),
        (None, 9, "operator pauses"),
    ],
)
def test_pause_shows_the_reason_of_its_longest_writer(
    engine: Engine, first: int | None, then: int | None, reason: str
) -> None:
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM durable.circuits"))
        write(Step("operator pauses", first), conn)
        write(Step("code pauses", then), conn)
        assert [row.reason for row in circuits.read(conn, SCHEMA)] == [reason]


def test_resume_returns_false_when_the_pause_is_over(engine: Engine) -> None:
    clock = ManualClock()
    in_memory = MemoryCircuits(clock)
    resumed: list[Callable[[], Resumed]] = [lambda: in_memory.resume(CircuitKind.HANDLER, TYPE)]
    in_memory.pause(CircuitKind.HANDLER, TYPE, reason="moving", actor="test", duration=HOUR)
    clock.advance(2 * HOUR)
    with engine.begin() as conn:
        write(Step("operator pauses", 1), conn)
        write(Step("time passes", 2), conn)
    with engine.begin() as conn:
        resumed.append(lambda: circuits.resume(conn, SCHEMA, CircuitKind.HANDLER, TYPE))
        assert [each() for each in resumed] == [Resumed(False), Resumed(False)]
