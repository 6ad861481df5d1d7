"""Parks by dead letters beside all that pauses the same key, or the same ordered handler, in any order.

The same steps are done to Postgres and to a bus in memory, and told to a small model: messages are stopped while either
is open, a resume ends a pause before a park, and nothing but a resume ends a park. Time passes by moving the rows back,
or the clock of the bus in memory ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import IntegrityError

from durable.application.handlers import Handler
from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId, new_id
from durable.messages.ordering import QueueKeys, Rule
from durable.storage import circuits, dead_letters, inbox, ordering, placements, status
from durable.storage.circuits import CircuitKind, OpenCircuit, Resumed
from durable.storage.inbox import Arrival
from durable.storage.ordering import Turn, Turns
from durable.storage.placements import Declared
from durable.storage.rows import Letter
from durable.testing import ManualClock
from durable.testing.circuits import MemoryCircuit
from durable.testing.mailbox import Mailbox
from durable.testing.rows import Row
from tests.failure.leftovers import envelope
from tests.support.tables import Tables

SCHEMA: Final = "durable"
NODE: Final = NodeId(1)
TYPE: Final = "parks.placed"
HOUR: Final = timedelta(hours=1)
LETTER: Final = Letter.because("refused", "test")


class Stopped(NamedTuple):
    """What is stopped: a key, or an ordered handler; with the key of its messages and their place in the order."""

    kind: CircuitKind
    key: str
    partition_key: str | None
    ordering_key: str


KEY: Final = Stopped(CircuitKind.KEY, "order-17", "order-17", "order-17")
HANDLER: Final = Stopped(CircuitKind.HANDLER, TYPE, None, TYPE)
KINDS: Final = {"key": KEY, "ordered handler": HANDLER}


class Step(NamedTuple):
    """What is done, and for how many hours; None: without an end."""

    name: str
    hours: int | None = None

    @property
    def time(self) -> timedelta | None:
        return None if self.hours is None else self.hours * HOUR


LETTER_STEP: Final = Step("message becomes a dead letter")
RESUME: Final = Step("operator resumes")
STEPS: Final = [
    LETTER_STEP,
    *(Step("operator pauses", hours) for hours in (None, 1)),
    *(Step("code pauses", hours) for hours in (None, 1)),
    *(Step("plain SQL pauses", hours) for hours in (None, 1)),
    Step("breaker opens"),
    Step("trial begins"),
    Step("something gets through"),
    RESUME,
    Step("time passes", 2),
    Step("ended rows are removed"),
    Step("letters are replayed"),
    Step("letters are discarded"),
]


class Model:
    """The rules: a park is ended by a resume alone, and by none that finds a pause, or a breaker, beside it."""

    def __init__(self) -> None:
        self.is_parked = False
        self.is_paused = False
        self.is_failing = False
        self.left: timedelta | None = None

    def hear(self, step: Step) -> None:
        is_longer = self.left is not None and (step.time is None or step.time > self.left)
        match step.name:
            case "message becomes a dead letter":
                self.is_parked = True
            case "operator pauses":
                self._pause(step.time)
            case "code pauses" if not self.is_paused or is_longer:
                self._pause(step.time)
            case "plain SQL pauses" if not (self.is_paused or self.is_failing):
                self._pause(step.time)
            case "breaker opens":
                self.is_failing = self.is_failing or not self.is_paused
            case "something gets through":
                self.is_failing = False
            case "time passes" if self.left is not None:
                self.left -= 2 * HOUR
                self.is_paused = self.left > timedelta(0)
            case _:
                pass

    def _pause(self, time: timedelta | None) -> None:
        self.is_paused, self.is_failing, self.left = True, False, time

    def resume(self) -> Resumed:
        if self.is_paused or self.is_failing:
            self.is_paused = self.is_failing = False
            return Resumed(True, "refused" if self.is_parked else None)
        was_parked, self.is_parked = self.is_parked, False
        return Resumed(was_parked)

    @property
    def rows(self) -> list[str]:
        """The open rows, in the order in which resumes end them."""
        return ["paused"] * self.is_paused + ["failing"] * self.is_failing + ["parked"] * self.is_parked


def named(row: OpenCircuit | MemoryCircuit, *, parked: bool) -> str:
    return "parked" if parked else "failing" if row.probing else "paused"


class OnPostgres:
    """The steps, as agents, operators and commands do them."""

    def __init__(self, engine: Engine, stopped: Stopped) -> None:
        self._engine = engine
        self._stopped = stopped
        with engine.begin() as conn:
            for table in ("circuits", "incoming_envelopes", "dead_letters", "received_ids"):
                conn.execute(text(f"DELETE FROM durable.{table}"))

    def do(self, step: Step) -> Resumed | None:
        with self._engine.begin() as conn:
            return self._do(step, conn)

    def _do(self, step: Step, conn: Connection) -> Resumed | None:
        kind, key, *_ = self._stopped
        said: dict[str, Any] = {"reason": step.name, "actor": "ada"}
        match step.name:
            case "message becomes a dead letter":
                lease = self._receive(conn)
                mine = "UPDATE durable.incoming_envelopes SET owner_id = :node WHERE id = :id"  # begun before any stop
                conn.execute(text(mine), {"node": NODE, "id": lease.envelope.id})
                assert inbox.dead_letter(conn, SCHEMA, NODE, lease, LETTER, parks=TYPE)
            case "operator pauses":
                circuits.pause(conn, SCHEMA, kind, key, duration=step.time, **said)
            case "code pauses":
                circuits.pause_at_least(conn, SCHEMA, kind, key, duration=step.time, **said)
            case "plain SQL pauses":
                circuits.close_ended(conn, SCHEMA)
                insert = """INSERT INTO durable.circuits (kind, key, reason, until, actor) VALUES (
                    :kind, :key, 'month end', now() + CAST(:time AS interval), 'accounting') ON CONFLICT DO NOTHING"""
                conn.execute(text(insert), {"kind": kind, "key": key, "time": step.time})
            case "breaker opens":
                circuits.open_circuit(conn, SCHEMA, kind, key, duration=HOUR, **said)
            case "trial begins":
                circuits.begin_trial(conn, SCHEMA, key, lease=HOUR)
            case "something gets through":
                circuits.close_circuit(conn, SCHEMA, kind, key)
            case "operator resumes":
                return circuits.resume(conn, SCHEMA, kind, key)
            case "time passes":
                moved = "UPDATE durable.circuits SET since = since - :by, until = until - :by"
                conn.execute(text(moved), {"by": step.time})
            case "ended rows are removed":
                circuits.close_ended(conn, SCHEMA)
            case "letters are replayed" | "letters are discarded":
                self._resolve(conn, is_replay=step.name == "letters are replayed")
            case _:
                raise AssertionError(step)
        return None

    def _receive(self, conn: Connection) -> LeasedEnvelope:
        made = msgspec.structs.replace(
            envelope(1, envelope_id=new_id()), message_type=TYPE, partition_key=self._stopped.partition_key
        )
        place = QueueKeys(self._stopped.ordering_key, None)
        inbox.store(conn, SCHEMA, [Arrival("shop", made, ANY_NODE, place)])
        return LeasedEnvelope(made, 0, "shop", ordering_key=self._stopped.ordering_key)

    @staticmethod
    def _resolve(conn: Connection, *, is_replay: bool) -> None:
        every, whole = dead_letters.Selection(), dead_letters.LetterRange(0, 2**62, 100)
        resolve = dead_letters.replay if is_replay else dead_letters.discard
        resolve(conn, SCHEMA, every, whole, actor="ada", reason="mended")

    def rows(self) -> list[str]:
        with self._engine.begin() as conn:
            return [named(row, parked=row.parked) for row in circuits.read(conn, SCHEMA)]

    def is_stopped(self, *, is_trial: bool = False) -> bool:
        """Tell whether no node can claim a message, which waits behind what became a letter."""
        with self._engine.connect() as conn:  # rolled back
            self._receive(conn)
            turns = Turns([Turn(self._stopped.ordering_key)], {TYPE: TYPE}, is_trial=is_trial)
            return not ordering.claim(conn, SCHEMA, turns, batch_size=1, node=NODE).leases


class InMemory:
    """The same steps on a bus in memory. Its letters are resolved by tests, which stops and ends nothing."""

    def __init__(self, stopped: Stopped) -> None:
        self._stopped = stopped
        self._clock = ManualClock()
        self._mailbox = Mailbox(self._clock)

    def do(self, step: Step) -> Resumed | None:
        rows, (kind, key, *_) = self._mailbox.circuits, self._stopped
        said: dict[str, Any] = {"reason": step.name, "actor": "ada"}
        match step.name:
            case "message becomes a dead letter":
                lease = self._receive()
                assert self._mailbox.dead_letter(NODE, lease, LETTER, parks=TYPE)
            case "operator pauses":
                rows.pause(kind, key, duration=step.time, **said)
            case "code pauses":
                rows.pause_at_least(kind, key, duration=step.time, **said)
            case "plain SQL pauses":
                if rows._unparked(kind, key) is None:
                    rows.pause(kind, key, duration=step.time, **said)
            case "breaker opens":
                rows.open_circuit(kind, key, duration=HOUR, **said)
            case "something gets through":
                rows.close_circuit(kind, key)
            case "operator resumes":
                return rows.resume(kind, key)
            case "time passes":
                assert step.time is not None
                self._clock.advance(step.time)
            case _:
                pass
        return None

    def _receive(self) -> LeasedEnvelope:
        made = msgspec.structs.replace(
            envelope(1, envelope_id=new_id()), message_type=TYPE, partition_key=self._stopped.partition_key
        )
        row = Row(made, "shop", ordering_key=self._stopped.ordering_key)
        self._mailbox.incoming[row.key] = row
        return row.lease()

    def rows(self) -> list[str]:
        found, name = self._mailbox.circuits, (self._stopped.kind, self._stopped.key)
        unparked = found._unparked(*name)
        paused = [] if unparked is None else [named(unparked, parked=False)]
        return paused + ["parked" for kind, key, _ in found._parks if (kind, key) == name]

    def is_stopped(self) -> bool:
        lease = self._receive()
        handlers = {TYPE: cast(Handler, SimpleNamespace(message_type=TYPE, run_of_key=1))}
        is_taken = bool(self._mailbox.take(handlers))
        del self._mailbox.incoming[lease.key[:2]]
        return not is_taken


@pytest.fixture(scope="module")
def engine(shared: Tables) -> Iterator[Engine]:
    engine = create_engine(shared.url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def check(engine: Engine, stopped: Stopped, steps: Sequence[Step]) -> None:
    model, stores = Model(), (OnPostgres(engine, stopped), InMemory(stopped))
    on_postgres, in_memory = stores
    for step in steps:
        before = model.rows
        told = [store.do(step) for store in stores]
        if step == RESUME:
            was_open, is_left = model.resume()
            expected = [(was_open, is_left is not None)] * 2
            assert [(each.was_open, each.still_parked is not None) for each in told if each is not None] == expected
        else:
            model.hear(step)
        assert on_postgres.rows() == in_memory.rows() == model.rows
        if model.rows == before:
            continue
        is_tried = stopped is HANDLER and model.rows == ["failing"]
        assert on_postgres.is_stopped() == bool(model.rows)
        assert on_postgres.is_stopped(is_trial=True) == (bool(model.rows) and not is_tried)
        assert is_tried or in_memory.is_stopped() == bool(model.rows)


@pytest.mark.parametrize("before", STEPS, ids=lambda step: f"{step.name} {step.hours or ''}".strip())
@pytest.mark.parametrize("stopped", KINDS.values(), ids=KINDS.keys())
def test_park_is_ended_by_a_resume_alone_in_each_pair_of_steps(engine: Engine, stopped: Stopped, before: Step) -> None:
    for after in STEPS:
        check(engine, stopped, [LETTER_STEP, before, after, RESUME, RESUME])
        check(engine, stopped, [before, LETTER_STEP, after, RESUME, RESUME])
        check(engine, stopped, [before, after, LETTER_STEP, RESUME, RESUME])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stopped=st.sampled_from([KEY, HANDLER]), steps=st.lists(st.sampled_from(STEPS), min_size=4, max_size=14))
def test_park_is_ended_by_a_resume_alone_through_any_steps(engine: Engine, stopped: Stopped, steps: list[Step]) -> None:
    check(engine, stopped, steps)


class TestAtOnce:
    """Two transactions at once: the second waits for the row of the first."""

    @staticmethod
    def second(engine: Engine, first: Connection, work: Callable[..., Any], **said: Any) -> Any:
        """Run work while `first` is open, commit that one once this waits for it, and return the result."""
        found: list[Any] = []

        def run() -> None:
            with engine.begin() as conn:
                found.append(work(conn, SCHEMA, *KEY[:2], **said))

        thread = threading.Thread(target=run)
        thread.start()
        waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        with engine.connect() as watching:
            while thread.is_alive() and not watching.execute(waits).scalar_one():
                watching.rollback()
        first.commit()
        thread.join(10)
        return found[0]

    @pytest.fixture(autouse=True)
    def parked(self, engine: Engine) -> None:
        OnPostgres(engine, KEY).do(LETTER_STEP)

    def test_dead_letter_amid_a_resume_parks_its_key_anew(self, engine: Engine) -> None:
        with engine.connect() as conn:
            assert circuits.resume(conn, SCHEMA, *KEY[:2]).was_open
            self.second(
                engine, conn, circuits.park, reason="refused too", actor="node 2", ordering_key=KEY.ordering_key
            )
        with engine.connect() as conn:
            assert [(row.parked, row.reason) for row in circuits.read(conn, SCHEMA)] == [(True, "refused too")]

    def test_second_resume_of_one_pause_leaves_the_park(self, engine: Engine) -> None:
        with engine.begin() as conn:
            circuits.pause(conn, SCHEMA, *KEY[:2], reason="moving", actor="ada", duration=None)
        with engine.connect() as conn:
            assert circuits.resume(conn, SCHEMA, *KEY[:2]).was_open
            second = self.second(engine, conn, circuits.resume)
        assert (second.was_open, second.still_parked is not None) == (False, True)
        with engine.connect() as conn:
            assert [row.parked for row in circuits.read(conn, SCHEMA)] == [True]

    def test_resume_from_an_old_page_leaves_a_newer_pause(self, engine: Engine) -> None:
        said: dict[str, Any] = {"reason": "moving", "actor": "ada", "duration": None}
        with engine.begin() as conn:
            circuits.open_circuit(conn, SCHEMA, *KEY[:2], **said)
            (seen,) = [row.since for row in circuits.read(conn, SCHEMA) if row.probing]
        with engine.connect() as conn:
            circuits.pause(conn, SCHEMA, *KEY[:2], **said)
            resumed = self.second(engine, conn, circuits.resume, seen=seen)
        assert not resumed.was_open
        with engine.connect() as conn:
            assert [row.parked for row in circuits.read(conn, SCHEMA)] == [False, True]


def test_park_with_an_end_is_refused_by_the_table(engine: Engine) -> None:
    for wrong in ("until = now()", "probing = true", "kind = 'destination'", "parked = false"):
        OnPostgres(engine, KEY).do(LETTER_STEP)
        with pytest.raises(IntegrityError, match="circuits"), engine.begin() as conn:
            conn.execute(text(f"UPDATE durable.circuits SET {wrong}"))


def test_messages_behind_a_pause_and_a_park_are_counted_once(engine: Engine) -> None:
    on_postgres = OnPostgres(engine, KEY)
    for step in (LETTER_STEP, Step("operator pauses")):
        on_postgres.do(step)
    with engine.connect() as conn:  # rolled back
        on_postgres._receive(conn)
        found = status.read(conn, SCHEMA)
    assert [(row.key, row.parked) for row in found.circuits.rows] == [(KEY.key, True), (KEY.key, False)]
    assert found.parked == {KEY.key: 1}
    assert found.gauges.open_circuits == {"key": 2}
    assert found.gauges.behind == {KEY.key: 1}


def test_message_of_an_ordered_handler_is_not_counted_behind_its_own_key(engine: Engine) -> None:
    on_postgres = OnPostgres(engine, KEY)
    on_postgres.do(LETTER_STEP)
    ordered = cast(OnPostgres, SimpleNamespace(_stopped=KEY._replace(ordering_key=TYPE)))
    with engine.connect() as conn:  # rolled back
        OnPostgres._receive(ordered, conn)
        found = status.read(conn, SCHEMA)
        on_postgres._receive(conn)
        both = status.read(conn, SCHEMA)
    assert (found.parked, found.gauges.behind) == ({}, {})
    assert both.parked == both.gauges.behind == {KEY.key: 1}


MOVED: Final = HANDLER._replace(ordering_key="another release's order")


@pytest.mark.parametrize("orders", [[HANDLER, MOVED], [MOVED, HANDLER]], ids=["declared first", "declared last"])
@pytest.mark.parametrize("store", ["postgres", "memory"])
def test_handler_is_parked_in_each_order_and_resumed_in_all(engine: Engine, store: str, orders: list[Stopped]) -> None:
    at = OnPostgres(engine, HANDLER) if store == "postgres" else InMemory(HANDLER)
    for number, at._stopped in enumerate(orders, 1):
        assert not at.is_stopped()
        at.do(LETTER_STEP)
        at.do(LETTER_STEP)
        assert at.is_stopped()
        assert at.rows() == ["parked"] * number
    assert at.do(RESUME) == Resumed(True)
    assert at.rows() == []
    assert at.do(RESUME) == Resumed(False)


@pytest.mark.parametrize("which", [0, 1])
def test_resume_of_one_park_on_a_page_ends_those_of_its_handler_in_all_orders(engine: Engine, which: int) -> None:
    at = OnPostgres(engine, HANDLER)
    for at._stopped in (HANDLER, MOVED):
        at.do(LETTER_STEP)
    with engine.connect() as conn:  # rolled back
        parks = circuits.read(conn, SCHEMA)
        assert len({park.since for park in parks}) == 2
        resumed = circuits.resume(conn, SCHEMA, CircuitKind.HANDLER, HANDLER.key, seen=parks[which].since)
        assert resumed == Resumed(True)
        assert circuits.read(conn, SCHEMA) == []


def test_resume_under_an_older_name_ends_the_parks_of_its_handler_in_all_orders(engine: Engine) -> None:
    at = OnPostgres(engine, HANDLER)
    for at._stopped in (HANDLER, MOVED):
        at.do(LETTER_STEP)
    with engine.connect() as conn:  # rolled back
        placements.declare(conn, SCHEMA, [Declared("incoming", "older.name", Rule(MOVED.ordering_key))])
        found = circuits.of_name(conn, SCHEMA, circuits.read(conn, SCHEMA), CircuitKind.HANDLER, "older.name")
        assert [row.order for row in found] == [MOVED.ordering_key, HANDLER.ordering_key]
        assert circuits.resume(conn, SCHEMA, CircuitKind.HANDLER, "older.name").was_open
        assert circuits.read(conn, SCHEMA) == []
