"""Who holds a business key: whatever happens under it, one message has its effects, and a freed key is usable again.

Sequences are generated, and run against Postgres and against the bus in memory; the books say what must come of each
step: who holds the key, and which sent_at was freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from durable.embedded import Embedded
from durable.encryption.repeats import is_another
from durable.encryption.ring import KeyRing
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.outcomes import OTHER_BODY, STORED
from durable.storage import dead_letters, delayed, inbox
from durable.storage.dead_letters import LetterRange, Selection
from durable.storage.inbox import Arrival
from durable.storage.rows import QUARANTINED, Letter
from durable.storage.sql import dead_letters as letter_statements
from durable.storage.sql.statement import Statement
from durable.testing import ManualClock
from durable.testing.mailbox import Mailbox
from durable.testing.operators import MemoryOperators
from durable.testing.rows import Handled
from tests.support.letters import ENDPOINT, NODE, SCHEMA
from tests.support.tables import Tables, shared_tables

KEY = uuid5(UUID(int=0), "invoice-17")
TYPE = "keys.invoice"
BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
LATER = timedelta(days=365)
FAILED = Letter.because("a test", "test")


class World(ABC):
    """Where messages under one key arrive, and what is done with them there."""

    knows_repeats: bool
    """Does it tell what was sent anew from a repeat of what was given up?"""

    @abstractmethod
    def arrive(self, envelope: Envelope, delay: timedelta | None = None) -> bool:
        """Was it stored to be handled?"""

    @abstractmethod
    def quarantine(self, envelope: Envelope) -> None: ...

    @abstractmethod
    def handle(self) -> Envelope | None:
        """What waits and is due, if anything."""

    @abstractmethod
    def fail(self) -> bool: ...

    @abstractmethod
    def cancel(self) -> bool: ...

    @abstractmethod
    def letters(self) -> list[tuple[Any, Envelope, bool]]:
        """Those that are unresolved: what names them, the sent_at and body, and whether they were quarantined."""

    @abstractmethod
    def discard(self, letter: Any) -> None: ...

    @abstractmethod
    def replay(self, letter: Any) -> bool: ...


class OnPostgres(World):
    knows_repeats = True

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    def arrive(self, envelope: Envelope, delay: timedelta | None = None) -> bool:
        due = None if delay is None else datetime.now(UTC) + delay
        arrival = Arrival(ENDPOINT, msgspec.structs.replace(envelope, execution_time=due), ANY_NODE)
        if inbox.store(self._conn, SCHEMA, [arrival]):
            return True
        known = inbox.find_known(self._conn, SCHEMA, [arrival]).get(arrival.key)
        if known is not None and is_another(KeyRing(), known[0], arrival.envelope, known[1]):
            reason = "another message was received under the same id before"
            inbox.quarantine(self._conn, SCHEMA, NODE, inbox.Unfit(ENDPOINT, envelope.body, reason, envelope))
        return False

    def quarantine(self, envelope: Envelope) -> None:
        unfit = inbox.Unfit(ENDPOINT, envelope.body, "too large", envelope, replayable=True)
        inbox.quarantine(self._conn, SCHEMA, NODE, unfit)

    def handle(self) -> Envelope | None:
        leases = self._claim()
        if not leases:
            return None
        assert inbox.finish_handled(self._conn, SCHEMA, NODE, leases) == 1
        return leases[0].envelope

    def fail(self) -> bool:
        return all(inbox.dead_letter(self._conn, SCHEMA, NODE, lease, FAILED) for lease in self._claim())

    def _claim(self) -> list[LeasedEnvelope]:
        return inbox.claim(self._conn, SCHEMA, message_type=TYPE, batch_size=10, node=NODE)

    def cancel(self) -> bool:
        return delayed.cancel_message(self._conn, SCHEMA, KEY, actor="ada", reason=None)

    def letters(self) -> list[tuple[Any, Envelope, bool]]:
        found = dead_letters.read(self._conn, SCHEMA, Selection(), _WHOLE)
        return [
            (each.summary.letter_id, invoice(each.body, each.sent_at), each.summary.exception_type == QUARANTINED)
            for each in found
        ]

    def discard(self, letter: Any) -> None:
        chosen = Selection(letters=[letter])
        assert dead_letters.discard(self._conn, SCHEMA, chosen, _WHOLE, actor="ada", reason="a test").done == [letter]

    def replay(self, letter: Any) -> bool:
        chosen = Selection(letters=[letter])
        return dead_letters.replay(self._conn, SCHEMA, chosen, _WHOLE, actor="ada").done == [letter]


class InMemory(World):
    knows_repeats = False  # its clock stands still

    def __init__(self) -> None:
        self._clock = ManualClock(BEGAN)
        self._mailbox = Mailbox(self._clock)
        self._operators = MemoryOperators(self._mailbox)
        self._resolved = set[datetime]()

    def arrive(self, envelope: Envelope, delay: timedelta | None = None) -> bool:
        outcome = self._mailbox.receive(ENDPOINT, envelope)
        if outcome is STORED and delay is not None:
            self._mailbox.incoming[KEY, ENDPOINT].due = self._clock.now() + delay
        lettered = {each.envelope.body for each in self._mailbox.history.dead_letters}
        assert outcome is not OTHER_BODY or envelope.body in lettered or envelope.sent_at in self._resolved
        return outcome is STORED

    def quarantine(self, envelope: Envelope) -> None:
        self._mailbox.history.quarantine(ENDPOINT, envelope, "too large", replayable=True)

    def handle(self) -> Envelope | None:
        leases = self._mailbox.take({})
        if not leases:
            return None
        self._mailbox.finish([Handled(None, leases[0].envelope, 1)], leases)
        return leases[0].envelope

    def fail(self) -> bool:
        return all(self._mailbox.dead_letter(NodeId(1), lease, FAILED) for lease in self._mailbox.take({}))

    def cancel(self) -> bool:
        return self._operators.cancel_message(KEY, actor="ada", reason=None)

    def letters(self) -> list[tuple[Any, Envelope, bool]]:
        return [
            (each, each.envelope, each.exception_type == QUARANTINED) for each in self._mailbox.history.dead_letters
        ]

    def discard(self, letter: Any) -> None:
        self._operators.discard(letter, "a test")
        self._resolved.add(letter.envelope.sent_at)
        with pytest.raises(ValueError, match="before"):
            self._operators.discard(letter, "a test")
        with pytest.raises(ValueError, match=r"before|used meanwhile|waits already"):
            self._operators.replay(letter)

    def replay(self, letter: Any) -> bool:
        try:
            self._operators.replay(letter)
        except ValueError:
            return False
        with pytest.raises(ValueError, match="before"):
            self._operators.discard(letter, "a test")
        return True


_WHOLE = LetterRange(0, 2**40, 1_000)


def invoice(body: bytes, sent_at: datetime | None) -> Envelope:
    assert sent_at is not None
    return Envelope(
        id=KEY,
        message_type=TYPE,
        destination=ENDPOINT,
        source="elsewhere",
        correlation_id=new_id(),
        body=body,
        sent_at=sent_at,
    )


class Books:
    """What must come of each step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: list[Envelope] = []
        self.holder: datetime | None = None  # a message is told by its sent_at
        self.freed: datetime | None = None
        self.waits: str | None = None
        self.effects: list[datetime] = []

    def do(self, step: str, which: int) -> None:
        getattr(self, step)(which)
        assert len(self.effects) <= 1

    def _new(self, which: int) -> Envelope:
        self.sent.append(invoice(b"ab"[which % 2 :][:1], BEGAN + timedelta(seconds=len(self.sent))))
        return self.sent[-1]

    def _arrive(self, envelope: Envelope, delay: timedelta | None = None) -> None:
        is_repeat = self.world.knows_repeats and envelope.sent_at == self.freed
        fresh = self.holder is None and not is_repeat
        assert self.world.arrive(envelope, delay) is fresh
        if fresh:
            self.holder, self.waits = envelope.sent_at, "due" if delay is None else "delayed"

    def send(self, which: int) -> None:
        self._arrive(self._new(which))

    def send_later(self, which: int) -> None:
        self._arrive(self._new(which), LATER)

    def repeat(self, which: int) -> None:
        if self.sent:
            self._arrive(self.sent[which % len(self.sent)])

    def send_large(self, which: int) -> None:
        self.world.quarantine(self._new(which))

    def repeat_when_too_large(self, which: int) -> None:
        if self.sent:
            self.world.quarantine(self.sent[which % len(self.sent)])

    def handle(self, which: int) -> None:
        handled = self.world.handle()
        assert (handled and handled.sent_at) == (self.holder if self.waits == "due" else None)
        if handled is not None:
            self.effects.append(handled.sent_at)
            self.waits = None

    def fail(self, which: int) -> None:
        assert self.world.fail()
        if self.waits == "due":
            self.waits = None

    def cancel(self, which: int) -> None:
        assert self.world.cancel() is (self.waits == "delayed")
        if self.waits == "delayed":
            self._free()

    def discard(self, which: int) -> None:
        if letters := self.world.letters():
            letter, envelope, was_quarantined = letters[which % len(letters)]
            self.world.discard(letter)
            if not was_quarantined:
                assert envelope.sent_at == self.holder
                self._free()

    def replay(self, which: int) -> None:
        if letters := self.world.letters():
            letter, envelope, was_quarantined = letters[which % len(letters)]
            replayed = self.world.replay(letter)
            assert replayed or was_quarantined
            assert not (replayed and was_quarantined and self.holder is not None)
            if replayed:
                self.holder, self.waits = envelope.sent_at, "due"

    def _free(self) -> None:
        self.freed, self.holder, self.waits = self.holder, None, None


STEPS = [
    "send", "send_later", "repeat", "send_large", "repeat_when_too_large",
    "handle", "fail", "cancel", "discard", "replay",
]  # fmt: skip
sequences = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=14)
# Each has had a second effect where a letter was taken for the message that holds its id.
DISCARDED = [("send", 0), ("handle", 0), ("send", 1), ("discard", 0), ("send", 0), ("handle", 0)]
DISCARDED_LARGE = [("send_large", 0), ("send", 1), ("handle", 0), ("discard", 0), ("send", 1), ("handle", 0)]
DISCARDED_REPEAT = [
    ("send", 0),
    ("handle", 0),
    ("repeat_when_too_large", 0),
    ("discard", 0),
    ("send", 0),
    ("handle", 0),
]
DISCARDED_ALARM = [("send", 0), ("send", 1), ("discard", 0), ("repeat", 1), ("handle", 0)]
REPLAYED = [("send_large", 0), ("send", 1), ("handle", 0), ("replay", 0), ("handle", 0)]
REPLAYED_REPEAT = [("send", 0), ("handle", 0), ("repeat_when_too_large", 0), ("replay", 0), ("handle", 0)]
CANCELLED = [("send_later", 0), ("cancel", 0), ("repeat", 0), ("send", 1), ("handle", 0), ("send", 0), ("handle", 0)]


def run(world: World, steps: list[tuple[str, int]]) -> None:
    books = Books(world)
    for step, which in steps:
        books.do(step, which)
    while (letters := world.letters()) and books.holder is None:
        world.discard(letters[0][0])
    books.send(0)
    books.handle(0)
    if books.waits is None and books.holder is not None:
        books.repeat(len(books.sent) - 1)


@pytest.fixture(scope="module")
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture(scope="module")
def on_postgres(tables: Tables) -> Iterator[Callable[[list[tuple[str, int]]], None]]:
    """Each sequence in a transaction that is rolled back, each step in a savepoint."""
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))

    def against(steps: list[tuple[str, int]]) -> None:
        with engine.connect() as conn:
            conn.execute(text("SELECT 1"))
            run(OnPostgres(conn), steps)
            conn.rollback()

    yield against
    engine.dispose()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(DISCARDED)
@example(DISCARDED_LARGE)
@example(DISCARDED_REPEAT)
@example(DISCARDED_ALARM)
@example(REPLAYED)
@example(REPLAYED_REPEAT)
@example(CANCELLED)
@given(sequences)
def test_business_key_has_one_effect_and_is_usable_when_freed(
    on_postgres: Callable[[list[tuple[str, int]]], None], steps: list[tuple[str, int]]
) -> None:
    on_postgres(steps)


@settings(max_examples=300, deadline=None)
@example(DISCARDED)
@example(DISCARDED_LARGE)
@example(DISCARDED_REPEAT)
@example(DISCARDED_ALARM)
@example(REPLAYED)
@example(REPLAYED_REPEAT)
@given(sequences)
def test_business_key_has_one_effect_in_memory_too(steps: list[tuple[str, int]]) -> None:
    run(InMemory(), steps)


@pytest.mark.parametrize(
    ("name", "guard", "instead", "steps"),
    [
        ("DISCARD_LETTERS", "AND known.message_digest = discarded.message_digest "
         "AND known.sent_at = discarded.sent_at", "", DISCARDED),
        ("DISCARD_LETTERS", f"AND side = 'incoming' AND exception_type <> '{QUARANTINED}'", "", DISCARDED_REPEAT),
        ("REPLAY_LETTERS", "WHERE known.given_up OR (", "WHERE true OR (", REPLAYED),
        ("REPLAY_LETTERS", f"FROM each WHERE exception_type <> '{QUARANTINED}'))", "FROM each))", REPLAYED_REPEAT),
    ],
    ids=["other message", "repeat", "replayed", "replayed repeat"],
)  # fmt: skip
def test_letter_has_a_second_effect_without_its_guard(
    on_postgres: Callable[[list[tuple[str, int]]], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    guard: str,
    instead: str,
    steps: list[tuple[str, int]],
) -> None:
    statement: Statement = getattr(letter_statements, name)
    assert guard in statement._sql, f"{name} has no {guard!r}: name its guard anew"
    unguarded = statement._sql.replace(guard, instead)
    if steps is DISCARDED:
        unguarded = unguarded.replace(f"AND side = 'incoming' AND exception_type <> '{QUARANTINED}'", "")
    monkeypatch.setattr(letter_statements, name, Statement(unguarded))
    with pytest.raises(AssertionError):
        on_postgres(steps)
