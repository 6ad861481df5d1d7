"""Contents of the pages: the reads of /health, /metrics and the command line, made once for a page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Concatenate, Final, NamedTuple, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable.application.handlers import Handler, MaxBatch
from durable.bus import Bus
from durable.console import viewers
from durable.console.access import Person, Role
from durable.envelope import NodeId
from durable.errors import DurableError
from durable.listed import SHOWN, Listed
from durable.observability import health
from durable.observability.health import NodeState
from durable.observability.stops import Stops
from durable.recovery.policy import DormancyPolicy
from durable.storage import circuits, dead_letters, delayed, flow, gauges, receipts, schedules
from durable.storage.bounded import Look, limit_times, look
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.dead_letters import Attempt, DeadLetter, Group, LetterRange, Relative, Selection, Summary, Survey
from durable.storage.flow import Flow, Slice
from durable.storage.gauges import MOST_COUNTED, Gauges, Side
from durable.storage.nodes import Node
from durable.storage.outages import described
from durable.storage.readiness import check_ready
from durable.storage.receipts import Standing

P = ParamSpec("P")
T = TypeVar("T")

UNREAD: Final = (DurableError, DBAPIError)
"""Errors of one service, for which a page of several leaves it out, and tells why_unread()."""
_FRESH_SECONDS: Final = 1.0
_EVER: Final = datetime.min.replace(tzinfo=UTC)


class Lane(NamedTuple):
    """Messages that wait for one destination, or handler."""

    name: str
    waiting: int
    oldest: timedelta | None
    circuits: Sequence[OpenCircuit]
    """The circuits that stop it, in the order in which resumes end them."""

    @property
    def is_many(self) -> bool:
        return self.waiting >= MOST_COUNTED


class Counted(NamedTuple):
    """Messages of one side: those that wait for a node, and those that a node has in hand."""

    number: int
    is_cut: bool
    """True where counting ended before all were counted."""

    @classmethod
    def of(cls, gauges: Gauges, side: Side) -> Counted:
        counts = [group.waiting for group in gauges.unowned[side]] + [*gauges.owned[side].values()]
        return cls(sum(counts), any(each >= MOST_COUNTED for each in counts))


class NodeRow(NamedTuple):
    """A node, or an owner of messages that is no node any more."""

    node_id: NodeId
    node: Node | None
    state: NodeState
    owned: int


class Overview(NamedTuple):
    """The state of the service."""

    now: datetime
    needs: Sequence[str]
    """Work for somebody, by the rule of `durable-agent status`."""
    destinations: Sequence[Lane]
    handlers: Sequence[Lane]
    stopped: int
    """Number of open circuits and pauses."""
    groups: Sequence[Group]
    nodes: Sequence[NodeRow]
    to_send: Counted
    to_handle: Counted
    dead_letters: int
    scheduled: int
    flow: Flow | None


class HandlerRow(NamedTuple):
    """A handler: what waits for it, its declaration if this bus has it, and what it did lately."""

    lane: Lane
    handler: Handler | None
    max_batch: MaxBatch
    did: Slice


class Keys(NamedTuple):
    """Paused and parked keys, and the number of messages that wait behind each, up to MOST_COUNTED."""

    circuits: Listed[OpenCircuit]
    waiting: Mapping[str, int]


class Letter(NamedTuple):
    """A dead letter with what led to it."""

    letter: DeadLetter
    attempts: Sequence[Attempt]
    relatives: Sequence[Relative]


class Found(NamedTuple):
    """Places of a message, and its newest dead letter."""

    standings: Sequence[Standing]
    letter: int | None


class Scheduled(NamedTuple):
    """Schedules, those that do not run first, and the delayed messages that are due next, up to MOST_COUNTED."""

    schedules: Sequence[schedules.Row]
    messages: Sequence[delayed.Delayed]
    paused_since: Mapping[str, datetime]
    """The beginnings of the pauses, by schedule: what a resume ends."""


class Reading:
    """Reads the state of the service of a bus. Raises StorageUnavailable."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._policy = DormancyPolicy(grace=bus.settings.dormant_grace, stale=bus.settings.heartbeat_stale)

    async def transaction(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a read of one page in a transaction of the service's database."""
        return await self._bus.runtime.database.transaction(work, *args, **kwargs)

    async def check(self) -> None:
        """Raise SchemaMismatch unless the tables are those of this version."""
        await self.transaction(check_ready)

    async def overview(self, person: Person) -> Overview:
        read, groups, flowing = await self._bus.runtime.database.transaction(read_overview)
        if not _sees_contents(person):
            read, groups = viewers.of_gauges(read), viewers.of_groups(groups)
        return self._overview(read, groups, flowing)

    def handlers(self, overview: Overview) -> list[HandlerRow]:
        """List the handlers that are declared, and the message types that wait for one, with what was done lately."""
        declared = self._bus.application.by_type()
        types = overview.flow.types if overview.flow is not None else {}
        found = [(lane, declared.get(lane.name), types.get(lane.name, Slice())) for lane in overview.handlers]
        unsaid = self._bus.settings.max_batch
        return [HandlerRow(lane, each, each.batch(unsaid) if each else unsaid, did) for lane, each, did in found]

    async def circuits(self, person: Person, page: int) -> Listed[OpenCircuit]:
        """Read a page of the open circuits and pauses."""
        return _for(person, await self._bus.runtime.database.transaction(circuits.listed, SHOWN, page))

    async def park(self, person: Person, kind: str, key: str) -> OpenCircuit | None:
        """Find the park of a key, or of an ordered handler."""
        found = await self._bus.runtime.database.transaction(read_circuits_of, kind, key)
        shown = found if _sees_contents(person) else viewers.of_circuits(found)
        return next((each for each in shown if each.parked), None)

    async def keys(self, person: Person, page: int) -> Keys:
        """Read a page of the paused and parked keys."""
        found = await self._bus.runtime.database.transaction(read_keys, page)
        return found._replace(circuits=_for(person, found.circuits))

    async def groups(self, person: Person) -> list[Group]:
        found = await self._bus.runtime.database.transaction(dead_letters.groups, Selection())
        return found if _sees_contents(person) else viewers.of_groups(found)

    async def page(self, person: Person, selection: Selection, before: int | None) -> list[Summary]:
        """The next dead letters, the newest first; one more than a page where there are more."""
        found = await self._bus.runtime.database.transaction(
            dead_letters.page, selection, limit=SHOWN + 1, before=before
        )
        return found if _sees_contents(person) else viewers.of_summaries(found)

    def handles(self, message_type: str | None) -> bool:
        """Tell whether this bus has the class of these messages."""
        return message_type in self._bus.application.by_type()

    async def survey(self, selection: Selection) -> Look[Survey]:
        """Count the letters that are selected, and find the newest, unless that takes too long."""
        return await self._bus.runtime.database.transaction(read_survey, selection)

    async def letter(self, person: Person, letter_id: int) -> Letter | None:
        found = await self._bus.runtime.database.transaction(read_letter, letter_id)
        if found is None or _sees_contents(person):
            return found
        return found._replace(letter=viewers.of_letter(found.letter), attempts=viewers.of_attempts(found.attempts))

    async def message(self, person: Person, message_id: UUID) -> Found:
        """Find a message by its id, everywhere in this service."""
        made_after = receipts.made_after([message_id], self._bus.settings.clock_lead)
        found = await self._bus.runtime.database.transaction(read_message, message_id, ended_after=made_after)
        return found if _sees_contents(person) else found._replace(standings=viewers.of_standings(found.standings))

    async def scheduled(self, person: Person) -> Scheduled:
        found = await self._bus.runtime.database.transaction(read_scheduled)
        return found if _sees_contents(person) else found._replace(schedules=viewers.of_schedules(found.schedules))

    def _overview(self, read: Gauges, groups: Sequence[Group], flowing: Flow | None) -> Overview:
        dormant = health.dormant(self._policy, read, time.monotonic())
        problems = health.problems(read, dormant, health.unowned_waits(read), self._bus.settings)
        states = health.node_states(read, self._bus.settings.heartbeat_stale)
        nodes = {node.node_id: node for node in read.nodes}
        return Overview(
            now=read.now,
            needs=[need.text for need in health.needs(read, problems, self._bus.settings)],
            destinations=_lanes(read, Side.OUTGOING, CircuitKind.DESTINATION, ()),
            handlers=_lanes(read, Side.INCOMING, CircuitKind.HANDLER, list(self._bus.application.by_type())),
            stopped=sum(read.open_circuits.values()),
            groups=groups,
            nodes=[
                NodeRow(node, nodes.get(node), state, sum(owned.get(node, 0) for owned in read.owned.values()))
                for node, state in health.troubled_first(states)
            ],
            to_send=Counted.of(read, Side.OUTGOING),
            to_handle=Counted.of(read, Side.INCOMING),
            dead_letters=read.dead_letters,
            scheduled=sum(read.scheduled.values()),
            flow=flowing,
        )


class Feed:
    """The overview for all pages that follow it: read once in a while, however many they are. Who asks while it is read
    gets the same answer, or the same failure.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._reads: dict[Role, tuple[float, asyncio.Task[Overview]]] = {}

    async def overview(self, person: Person) -> Overview:
        """Return the state of the service, at most a second old. Raises StorageUnavailable."""
        begun, task = self._reads.get(person.role, (-_FRESH_SECONDS, None))
        if task is None or (task.done() and time.monotonic() - begun >= _FRESH_SECONDS):
            task = asyncio.create_task(self._reading.overview(person), name="console: overview")
            task.add_done_callback(_retrieved)
            self._reads[person.role] = time.monotonic(), task
        return await asyncio.shield(task)


def why_unread(error: Exception) -> str:
    """Say why a service cannot be read."""
    return described(error) if isinstance(error, DBAPIError) else str(error)


def _retrieved(task: asyncio.Task[Overview]) -> None:
    """Take a failure that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _for(person: Person, listed: Listed[OpenCircuit]) -> Listed[OpenCircuit]:
    return listed if _sees_contents(person) else replace(listed, rows=viewers.of_circuits(listed.rows))


def _sees_contents(person: Person) -> bool:
    return person.role >= Role.OPERATOR


def read_overview(conn: Connection, schema: str) -> tuple[Gauges, list[Group], Flow | None]:
    groups = dead_letters.groups(conn, schema, Selection())[:5]
    return gauges.read(conn, schema), groups, flow.read(conn, schema)


def read_letter(conn: Connection, schema: str, letter_id: int) -> Letter | None:
    selection = Selection(letters=[letter_id], resolved=None)
    found = dead_letters.read(conn, schema, selection, LetterRange(letter_id - 1, letter_id, 1))
    if not found:
        return None
    return Letter(
        found[0],
        dead_letters.attempts(conn, schema, letter_id),
        dead_letters.relatives(conn, schema, found[0]),
    )


def read_message(conn: Connection, schema: str, message_id: UUID, *, ended_after: datetime | None) -> Found:
    standings = receipts.look(conn, schema, [message_id], ended_after=ended_after).standings
    once = {(each.side, each.address, each.outcome, each.reason): each for each in sorted(standings, key=_attempts)}
    letters = dead_letters.page(conn, schema, Selection(ids=[message_id], resolved=None), limit=1)
    ends = sorted(once.values(), key=_place_and_end)
    return Found(ends, letters[0].letter_id if letters else None)


def _attempts(standing: Standing) -> int:
    """Order the history before the letter of the same end, which knows more."""
    return standing.attempts


def _place_and_end(standing: Standing) -> tuple[str, str, bool, datetime]:
    return standing.side, standing.address, standing.ended_at is None, standing.ended_at or _EVER


def read_survey(conn: Connection, schema: str, selection: Selection) -> Look[Survey]:
    limit_times(conn, schema)
    return look(conn, schema, dead_letters.survey, selection)


def read_circuits_of(conn: Connection, schema: str, kind: str, key: str) -> Sequence[OpenCircuit]:
    if kind not in list(CircuitKind):
        return []
    return circuits.of_name(conn, schema, circuits.read(conn, schema), CircuitKind(kind), key)


def read_keys(conn: Connection, schema: str, page: int) -> Keys:
    found = circuits.listed(conn, schema, SHOWN, page, kind=CircuitKind.KEY)
    return Keys(found, gauges.waiting_behind(conn, schema, circuits.orders_of(found.rows)))


def read_scheduled(conn: Connection, schema: str) -> Scheduled:
    messages = delayed.page(conn, schema, delayed.Selection(), limit=MOST_COUNTED)
    found = schedules.read(conn, schema)
    pauses = circuits.listed(conn, schema, MOST_COUNTED, kind=CircuitKind.SCHEDULE).rows
    return Scheduled(schedules.troubled_first(found), messages, {each.key: each.since for each in pauses})


def _lanes(read: Gauges, side: Side, kind: CircuitKind, declared: Sequence[str]) -> list[Lane]:
    """Return those with waiting messages, those that are stopped, and those that this bus declares."""
    waiting = {group.name: group for group in read.unowned[side]}
    opened: dict[str, list[OpenCircuit]] = {}
    for circuit in read.circuits:
        if circuit.kind == kind:
            opened.setdefault(circuit.key, []).append(circuit)
    stops = Stops(read)

    def stopping(name: str) -> Sequence[OpenCircuit]:
        """Return what stops it, or has its name: a park may have that of a handler of another release."""
        stopped = stops.of(name) if kind == CircuitKind.HANDLER else []
        return [*stopped, *(each for each in opened.get(name, []) if each not in stopped)]

    lanes = [
        Lane(name, group.waiting if (group := waiting.get(name)) else 0, group and group.oldest_age, stopping(name))
        for name in sorted(waiting.keys() | opened.keys() | set(declared))
    ]
    return sorted(lanes, key=lambda lane: (not lane.circuits, -lane.waiting, lane.name))
