"""check-deploy: whether this code handles the messages that wait in the database it is deployed to.

    inbox, scheduled     the message decodes for its handler · does not · has no handler here
    dead letters         the same, for letters that decoded when they failed: whether a replay would still work
    inbox                a living node there handles the message · the message waits for this code
    recurring            this code declares each schedule that runs there · does not

Messages are read in one read-only transaction, page by page, without a snapshot, which would stop the database's
vacuum. No message is handled, only decoded and upcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

import typer
from sqlalchemy import Connection

from durable.agents.startup_check import DecodeCheck
from durable.application.application import Application
from durable.cli.command import taking
from durable.cli.doctor.checks import Verdict
from durable.cli.output import Block, Show, emit, progress
from durable.cli.target import BusName, DatabaseUrl, SchemaName, connection, load_target
from durable.envelope import TENANT
from durable.errors import InvalidMessage, SchemaMismatch
from durable.observability import health
from durable.settings import Settings
from durable.storage import dead_letters, gauges, in_flight, migrator, nodes, schedules
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection
from durable.storage.gauges import Gauges
from durable.storage.in_flight import InFlight, Page

Place = Literal["inbox", "scheduled", "dead letters", "recurring"]

_PAGE: Final = Page(batch_size=1_000, batch_bytes=8 << 20)
_LETTERS_AT_ONCE: Final = 100
_NEVER_DECODED: Final = f"{InvalidMessage.__module__}.{InvalidMessage.__qualname__}"
_FIRST: Final = UUID(int=0), ""

_DECODE: Final = "write an upcaster, or keep the old class until these messages are handled"
_HANDLE: Final = "keep the handler until these messages are handled: without it they become dead letters"
_RECUR: Final = "declare the schedule with bus.every(), unless it is to end"
_OPEN: Final = "give the keys of that database by encryption_keys, encryption_key_file or Bus.keys_from()"
_DEPLOY: Final = "deploy this code, which handles them"
_REPLAY: Final = "replay or discard these letters first, or write an upcaster"


@dataclass(frozen=True, slots=True)
class Finding:
    """The prospect of the messages of one type in one place; `advice` is empty when the verdict is ok."""

    message_type: str
    place: Place
    verdict: Verdict
    count: int
    undecodable: int
    detail: str
    ids: Sequence[UUID] = ()
    advice: str = ""


@taking()
def check_deploy(app: BusName, database: DatabaseUrl = None, schema: SchemaName = None) -> None:
    """Check that this code handles the messages that wait in a database, before it is deployed there.

    The database is only read. Ends with 1 when messages would become dead letters.
    """
    bus, settings = load_target(app, database, schema)
    assert bus is not None
    found = findings(bus.application, settings)
    emit({"healthy": is_healthy(found), "types": found}, *_lines(found))
    if not is_healthy(found):
        raise typer.Exit(1)


def findings(application: Application, settings: Settings) -> list[Finding]:
    """Judge messages by type and place. Raises StorageUnavailable; SchemaMismatch without tables of durable."""
    schema = settings.db_schema
    with connection(settings, read_only=True) as conn:
        if migrator.current_version(conn, schema) is None:
            raise SchemaMismatch(f"check-deploy: schema {schema!r} has no durable tables; name another with --schema")
        survey = _Survey(application)
        letters = dead_letters.survey(conn, schema, _LETTERS)
        with progress("decoded") as show:
            survey.scan(_inbox(conn, schema), in_flight.count(conn, schema) + letters.replayable, show)
            survey.scan_letters(_letters(conn, schema, letters.newest), show)
        found = survey.findings(_others(conn, schema, application.service)) + _undeclared(conn, schema, application)
        found += _unclaimed(gauges.read(conn, schema), application, settings)
    return sorted(found, key=lambda each: (each.message_type, each.place))


class _Survey:
    """The findings so far."""

    def __init__(self, application: Application) -> None:
        self._classes = {name: handler.cls for name, handler in application.by_type().items()}
        self._ring = application.ring
        self._trials: dict[tuple[str, Place], DecodeCheck] = {}
        self._unhandled: dict[tuple[str, Place], int] = {}
        self._done = self._total = 0

    def scan(self, pages: Iterable[Sequence[InFlight]], total: int, show: Show) -> None:
        self._total = total
        for page in pages:
            for message in page:
                self._try("scheduled" if message.is_scheduled else "inbox", message)
            self._told(len(page), show)

    def scan_letters(self, pages: Iterable[Sequence[DeadLetter]], show: Show) -> None:
        for page in pages:
            for letter in page:
                if (message := _message_of(letter)) is not None:
                    self._try("dead letters", message)
            self._told(len(page), show)

    def findings(self, others: dict[str, str]) -> list[Finding]:
        """List the findings; `others` names the service that handles a type in the same database."""
        found = [_finding(key, trial) for key, trial in self._trials.items()]
        return found + [_unhandled(key, count, others.get(key[0])) for key, count in self._unhandled.items()]

    def _try(self, place: Place, message: InFlight) -> None:
        key = message.message_type, place
        cls = self._classes.get(message.message_type)
        if cls is None:
            self._unhandled[key] = self._unhandled.get(key, 0) + 1
            return
        if key not in self._trials:
            self._trials[key] = DecodeCheck(message.message_type, cls, self._ring)
        self._trials[key].run([message])

    def _told(self, count: int, show: Show) -> None:
        self._done += count
        show(self._done, max(self._done, self._total))


_LETTERS: Final = Selection(side="incoming")


def _inbox(conn: Connection, schema: str) -> Iterator[list[InFlight]]:
    after = _FIRST
    while page := in_flight.every(conn, schema, _PAGE, after=after):
        yield page
        after = page[-1].id, page[-1].endpoint


def _letters(conn: Connection, schema: str, newest: int) -> Iterator[list[DeadLetter]]:
    after = 0
    while page := dead_letters.read(conn, schema, _LETTERS, LetterRange(after, newest, _LETTERS_AT_ONCE)):
        yield page
        after = page[-1].summary.letter_id


def _message_of(letter: DeadLetter) -> InFlight | None:
    """Return a message that could be replayed; this code is not blamed for one that never decoded."""
    lease = letter.lease()
    if lease is None or letter.summary.exception_type == _NEVER_DECODED:
        return None
    envelope = lease.envelope
    number, endpoint = letter.summary.letter_id, letter.summary.address
    return InFlight(
        *(number, envelope.id, endpoint, envelope.message_type, envelope.content_type, envelope.body),
        is_scheduled=False,
        tenant=envelope.headers.get(TENANT),
    )


def _others(conn: Connection, schema: str, service: str) -> dict[str, str]:
    """Map the message types that nodes of other services handle in this database to the service."""
    return {
        message_type: node.service
        for node in nodes.read(conn, schema)
        if node.service != service
        for message_type in node.message_types
    }


def _unclaimed(seen: Gauges, application: Application, settings: Settings) -> list[Finding]:
    """Find messages that this code handles and no living node there does."""
    handled = application.by_type()
    return [
        Finding(
            group.name,
            "inbox",
            Verdict.WARN,
            group.waiting,
            undecodable=0,
            detail=f"{group.waiting:,} wait without an owner, no living node there handles them",
            advice=_DEPLOY,
        )
        for group in health.unclaimed(seen, settings)
        if group.name in handled
    ]


def _undeclared(conn: Connection, schema: str, application: Application) -> list[Finding]:
    """Find schedules that a node of this service runs and this code does not declare."""
    own = {node.node_id for node in nodes.read(conn, schema) if node.service == application.service}
    return [
        Finding(
            row.message_type or "",
            "recurring",
            Verdict.WARN,
            count=1,
            undecodable=0,
            detail=f"schedule {row.name} ({row.cron}) is not declared by this code and would stop",
            advice=_RECUR,
        )
        for row in schedules.read(conn, schema)
        if row.declared_by in own and row.name not in application.schedules
    ]


def _finding(key: tuple[str, Place], trial: DecodeCheck) -> Finding:
    message_type, place = key
    opened = trial.tried - trial.locked
    unseen = f"; {trial.locked:,} not looked at: they are encrypted, and do not open here" if trial.locked else ""
    if trial.failed:
        verb = "does" if trial.failed == 1 else "do"
        detail = f"{trial.failed:,} of {opened:,} {verb} not decode: {trial.error}{unseen}"
        advice = _REPLAY if place == "dead letters" else _DECODE
        return Finding(message_type, place, Verdict.FAIL, trial.tried, trial.failed, detail, trial.ids, advice)
    verdict, advice = (Verdict.WARN, _OPEN) if trial.locked else (Verdict.OK, "")
    return Finding(message_type, place, verdict, trial.tried, 0, f"{opened:,} decode{unseen}", (), advice)


def _unhandled(key: tuple[str, Place], count: int, other: str | None) -> Finding:
    message_type, place = key
    if other is not None:
        return Finding(message_type, place, Verdict.OK, count, 0, f"{count:,}, handled by service {other}")
    verdict, advice = (Verdict.WARN, _REPLAY) if place == "dead letters" else (Verdict.FAIL, _HANDLE)
    return Finding(message_type, place, verdict, count, 0, f"{count:,} without a handler", (), advice)


def is_healthy(found: Iterable[Finding]) -> bool:
    return all(each.verdict is not Verdict.FAIL for each in found)


def _lines(found: Sequence[Finding]) -> Iterator[Block]:
    for each in found:
        ids = f" ({', '.join(map(str, each.ids))})" if each.ids else ""
        yield f"{each.verdict:<4}  {each.message_type}, {each.place}: {each.detail}{ids}"
        if each.advice:
            yield f"      -> {each.advice}"
    if not found:
        yield f"{Verdict.OK:<4}  no waiting messages"
