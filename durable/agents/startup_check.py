"""Check before a node starts: waiting messages must decode with the code of this node.

    each type that is handled here --> its oldest, its newest --> decode, upcast --> start
                                                                        |
                                   UndecodableMessages, or with pause_undecodable: that type is paused on every node

Types without a handler in this code are not checked: during a deploy, other nodes handle them. Types paused without an
end are not checked, because none of their messages is handled. When very many messages of a type are in flight, a
bounded number is checked, the oldest and the newest: those sent before a change, and those sent last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from durable.application.application import Application
from durable.encryption.decoding import decode
from durable.encryption.ring import KeyRing
from durable.errors import Forged, InvalidMessage, MissingKey, UndecodableMessages, text_of
from durable.outcomes import LONGEST_REASON, printable
from durable.settings import Settings
from durable.storage import circuits, in_flight
from durable.storage.circuits import CircuitKind
from durable.storage.database import Database
from durable.storage.in_flight import InFlight, Page
from durable.tasks.own_threads import in_own_thread
from durable.telemetry import log

SHOWN_IDS = 3
BEFORE_ITS_START = ", before its start"
"""The end of the actor of a pause that a node begins before it starts."""

_ADVICE = (
    "deploy code or an upcaster that decodes them; or start with --pause-undecodable, which pauses these types and "
    "runs the rest; or let them become dead letters, with --check-pending 0"
)


class DecodeCheck:
    """Messages of one type, tried one after the other against the class that is to handle them."""

    def __init__(self, message_type: str, cls: type[Any], ring: KeyRing | None = None) -> None:
        self.message_type = message_type
        self.tried = 0
        self.failed = 0
        self.locked = 0
        """Encrypted ones that cannot be opened here."""
        self.error = ""
        """The error of the first undecodable message."""
        self.ids: list[UUID] = []
        """The first of those that do not decode."""
        self._cls = cls
        self._ring = ring or KeyRing()

    def run(self, messages: Iterable[InFlight]) -> None:
        for message in messages:
            self.tried += 1
            try:
                decode(self._ring, message.lease(), self._cls)
            except (MissingKey, Forged):  # no fault of the code: it is parked, or becomes a dead letter
                self.locked += 1
            except InvalidMessage as error:
                self.note(message.id, text_of(error))

    def note(self, message_id: UUID, error: str) -> None:
        self.failed += 1
        self.error = self.error or " ".join(printable(error).split())
        if len(self.ids) < SHOWN_IDS:
            self.ids.append(message_id)


async def guard(database: Database, application: Application, settings: Settings) -> None:
    """Raise UndecodableMessages when something in flight does not decode; or pause its type, if that is the setting."""
    if not settings.check_pending:
        return
    open_circuits = await database.transaction(circuits.read)
    paused = {row.key for row in open_circuits if row.kind == CircuitKind.HANDLER and row.until is None}
    classes = {
        name: handler.cls
        for name, handler in application.by_type().items()
        if paused.isdisjoint((name, handler.message_type))
    }
    undecodable = await scan(database, classes, settings, application.ring)
    if not undecodable:
        return
    lines = {message_type: _line(trial, is_all) for message_type, (trial, is_all) in undecodable.items()}
    if not settings.pause_undecodable:
        raise UndecodableMessages("\n".join([*lines.values(), _ADVICE]))
    for message_type, line in lines.items():
        log.error("message type paused until it is resumed: %s", line)
        await database.transaction(
            circuits.pause_at_least,
            CircuitKind.HANDLER,
            message_type,
            reason=line[:LONGEST_REASON],
            actor=application.service + BEFORE_ITS_START,
            duration=None,
        )


async def scan(
    database: Database, classes: Mapping[str, type[Any]], settings: Settings, ring: KeyRing | None = None
) -> dict[str, tuple[DecodeCheck, bool]]:
    """The types of which something does not decode; and was that all of it that is in flight?"""
    page = Page(settings.batch_size, settings.batch_bytes)
    found: dict[str, tuple[DecodeCheck, bool]] = {}
    for message_type, cls in sorted(classes.items()):
        trial = DecodeCheck(message_type, cls, ring)
        is_all = await _try(database, trial, page, settings.check_pending)
        if trial.failed:
            found[message_type] = trial, is_all
    return found


async def _try(database: Database, trial: DecodeCheck, page: Page, most: int) -> bool:
    """Decode up to `most` messages of one type. True when there are no more."""
    after, before = 0, in_flight.LAST_SEQ
    while (left := (most + 1) // 2 - trial.tried) > 0:
        rows = await database.transaction(in_flight.oldest, trial.message_type, _within(page, left), after=after)
        if not rows:
            return True
        await in_own_thread(trial.run, rows)  # the loop may be that of a web process, which has others to serve
        after = rows[-1].seq
    while (left := most - trial.tried) > 0:
        rows = await database.transaction(
            in_flight.newest, trial.message_type, _within(page, left), after=after, before=before
        )
        if not rows:
            return True
        await in_own_thread(trial.run, rows)
        before = rows[-1].seq
    return False


def _within(page: Page, left: int) -> Page:
    return page._replace(batch_size=min(page.batch_size, left))


def _line(trial: DecodeCheck, is_all: bool) -> str:
    counted = f"{trial.failed:,} of {trial.tried:,} in flight"
    if not is_all:
        counted = f"{trial.failed:,} of the {trial.tried:,} in flight that were looked at, the oldest and the newest,"
    verb = "does" if trial.failed == 1 else "do"
    return f"{trial.message_type}: {counted} {verb} not decode: {trial.error} ({', '.join(map(str, trial.ids))})"
