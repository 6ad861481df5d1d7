"""Actions of forms. Each is recorded, with the name of who did it, in the transaction of its change."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from durable.bus import Bus
from durable.console.access import Person, Role
from durable.console.packing import is_line, packed, unpacked, unpacked_text
from durable.console.runs import Progress, Runs, new_name
from durable.console.security import fields, redirect
from durable.dead_letters.bulk import Resolution
from durable.duration import time_from_now
from durable.errors import DurableError
from durable.grammar import suggestion
from durable.messages.validation import MAX_TEXT_BYTES
from durable.redaction import printable
from durable.storage import actions, dead_letters, known_names, schedules
from durable.storage.actions import Action
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import Selection
from durable.transports.addresses import as_stored

_LONGEST: Final = 500
_PAUSED_HERE: Final = (CircuitKind.DESTINATION, CircuitKind.HANDLER)


class Actions:
    """The actions of one console, on the service of a bus."""

    def __init__(self, bus: Bus, runs: Runs) -> None:
        self._bus = bus
        self._runs = runs

    async def pause(self, request: Request, person: Person) -> Response:
        """Stop a destination or a handler on every node, for a time or until it is resumed."""
        kind, key = await self._circuit(request)
        if kind not in _PAUSED_HERE:
            raise HTTPException(422, f"a {kind} is paused by durable-agent pause")
        time = await _field(request, "for", needed=False)
        try:
            duration = time_from_now(time) if time else None
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        if duration is not None and not duration:
            raise HTTPException(422, "for: the pause is over before it begins; give a time above 0, or none")
        reason = await _field(request, "reason")
        named = [(kind, each) for each in await self._keys(kind, key)]
        said: Any = {"reason": reason, "actor": _actor(person), "duration": duration, "replaces": False}
        if not await self._bus.runtime.database.transaction(actions.pause, named, **said):
            raise HTTPException(409, f"{kind} {key} is paused already: see by whom, and resume it first")
        return redirect(request, "circuits")

    async def resume(self, request: Request, person: Person) -> Response:
        """Go on before the time, with what is as the person has seen it."""
        kind, key = await self._circuit(request)
        seen = await _moment(request, "since")
        resumed = await self._bus.runtime.database.transaction(
            actions.resume, [(kind, key)], actor=_actor(person), seen=seen
        )
        if not resumed.was_open:
            why = "it goes on already, was stopped anew meanwhile, or is paused besides: resume the pause first"
            raise HTTPException(409, f"{kind} {key} was not resumed: {why}")
        left = None if resumed.still_parked is None else {"kind": kind.value, "packed-key": packed(key)}
        return redirect(request, "circuits", left)

    async def change_scheduled(self, request: Request, person: Person) -> Response:
        """Run a schedule or a delayed message now, cancel the message, or pause and resume the schedule."""
        verb, schedule = await _field(request, "verb"), await _name(request, "schedule", needed=False)
        if schedule:
            refusal = await self._change_schedule(request, verb, schedule, person)
        else:
            refusal = await self._change_message(request, verb, _actor(person))
        if refusal is not None:
            raise HTTPException(409, refusal)
        return redirect(request, "scheduled")

    async def _change_schedule(self, request: Request, verb: str, name: str, person: Person) -> str | None:
        """Return the reason why nothing was changed."""
        actor = _actor(person)
        database, named = self._bus.runtime.database, [(CircuitKind.SCHEDULE, name)]
        if verb == "run-now":
            done = await database.transaction(actions.run_schedule, name, actor=actor)
            return None if done else f"no node that runs declares schedule {name!r}, so its message is unknown"
        if not await database.transaction(schedules.read, [name]):
            return f"there is no schedule {name!r}: it may have been removed"
        if verb == "pause":
            said: Any = {"reason": "paused in the console", "actor": actor, "duration": None, "replaces": False}
            if not await database.transaction(actions.pause, named, **said):
                return f"schedule {name!r} is paused already: see by whom, and resume it first"
        elif verb == "reschedule":
            at = await _time_ahead(request)
            if not await database.transaction(actions.reschedule, name, at=at, actor=actor):
                return f"no node has computed the next time of schedule {name!r} yet; try again once a node runs"
        elif verb == "resume":
            seen = await _moment(request, "since")
            resumed = await database.transaction(actions.resume, named, actor=actor, seen=seen)
            if not resumed.was_open:
                return f"schedule {name!r} was not resumed: it goes on already, or was paused anew meanwhile"
        else:
            raise HTTPException(422, f"verb: {verb!r} is none of pause, resume, run-now, reschedule")
        return None

    async def _change_message(self, request: Request, verb: str, actor: str) -> str | None:
        message = await _message_id(request)
        database, keep_body = self._bus.runtime.database, self._bus.settings.history_bodies
        if verb == "run-now":
            done = await database.transaction(actions.run_message_now, message, actor=actor)
        elif verb == "cancel":
            done = await database.transaction(
                actions.cancel_message, message, actor=actor, reason=None, keep_body=keep_body
            )
        elif verb == "reschedule":
            at, window = await _time_ahead(request), self._bus.settings.dedupe_window
            rescheduling = database.transaction(
                actions.reschedule_message, message, at=at, dedupe_window=window, actor=actor
            )
            resolved = await rescheduling
            if resolved.left:
                return f"message {message} would expire, or be too old, by then; give an earlier time"
            done = bool(resolved.done)
        else:
            raise HTTPException(422, f"verb: {verb!r} is none of run-now, cancel, reschedule")
        return None if done else f"message {message} does not wait for its time any more"

    async def _keys(self, kind: CircuitKind, name: str) -> Sequence[str]:
        """Return the keys of a name; an address that is resolved by message type is one destination for each.

        Refuses a name that nobody knows: its pause would pause nothing.
        """
        application, is_handler = self._bus.application, kind is CircuitKind.HANDLER
        declared = list(application.by_type()) if is_handler else application.destinations()
        try:
            keys: Sequence[str] = [name] if is_handler else self._bus.runtime.envelope_factory.destinations_of(name)
        except DurableError as error:
            raise HTTPException(422, f"key: {error}") from error
        if set(declared).isdisjoint([name, *keys]):
            stored = await self._bus.runtime.database.transaction(known_names.read, kind, [name, *keys])
            keys, known = as_stored(keys, name, stored), [*declared, *stored]
            if name not in known:
                raise HTTPException(422, f"no {kind} {name!r} is declared or stored{suggestion(name, known)}")
        return keys

    async def _circuit(self, request: Request) -> tuple[CircuitKind, str]:
        kind = await _field(request, "kind")
        if kind not in set(CircuitKind):
            raise HTTPException(422, f"kind: {kind!r} is none of {', '.join(CircuitKind)}")
        return CircuitKind(kind), await _name(request, "key")

    async def resolve(self, request: Request, person: Person) -> Response:
        """Begin to replay, or to discard, one letter, or those that a page has shown."""
        selection, what = await _selected(request)
        rate = _rate(await _field(request, "rate", needed=False))
        reason = await _field(request, "reason", needed=False) or None
        verb = await _field(request, "verb")
        change: Resolution
        if verb == "replay":
            change = partial(dead_letters.replay, actor=_actor(person), reason=reason)
        elif verb != "discard":
            raise HTTPException(422, f"verb: {verb!r} is neither replay nor discard")
        elif selection.letters is None and person.role < Role.ADMIN:
            raise HTTPException(403, f"{person.name} is an operator here, and may discard letters one at a time")
        elif reason is None:
            raise HTTPException(422, "reason: it is missing, and is kept with what is discarded; go back and give one")
        else:
            change = partial(dead_letters.discard, actor=_actor(person), reason=reason)
        action = Action(actor=_actor(person), verb=verb, target=f"dead letters: {what}", reason=reason)
        change = actions.recorded(change, action)
        progress = Progress(new_name(), f"{verb} {what}", f"{verb}ed", _actor(person))
        self._runs.begin(lambda: self._bus.runtime.database, change, selection, progress, rate)
        return redirect(request, "run", name=progress.name)

    async def stop(self, request: Request, person: Person) -> Response:
        """Stop a run after the batch that it is at."""
        progress = self._runs.find(request.path_params["name"])
        if progress is None:
            raise HTTPException(404, "there is no such run in this process, so nothing was stopped")
        if not progress.is_over and not progress.stopping.is_set():
            progress.stopping.set()
            stopped = Action(actor=_actor(person), verb="stop", target=f"{progress.what}, by {progress.actor}")
            await self._bus.runtime.database.transaction(actions.record, stopped, progress.run.done)
        return redirect(request, "run", name=request.path_params["name"])


async def _selected(request: Request) -> tuple[Selection, str]:
    letter = await _field(request, "letter", needed=False)
    if letter:
        if not (letter.isascii() and letter.isdigit() and len(letter) < 19):
            raise HTTPException(422, f"letter: {letter!r} is no number")
        return Selection(letters=[int(letter)]), f"letter {letter}"
    selection = unpacked((await fields(request)).get("selection", ""))
    return selection, actions.told("those shown", selection)


async def _time_ahead(request: Request) -> datetime:
    try:
        return datetime.now(UTC) + time_from_now(await _field(request, "for", needed=False))
    except ValueError as error:
        raise HTTPException(422, f"for: {error}") from error


def _rate(text: str) -> float | None:
    """Read the letters a second of a run; None: as fast as the database takes them."""
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.01 <= rate <= 1_000_000:
        raise HTTPException(422, f"rate: {text!r} is no number of letters a second; give one from 0.01 to 1000000")
    return rate


async def _message_id(request: Request) -> UUID:
    try:
        return UUID(await _field(request, "message"))
    except ValueError:
        raise HTTPException(422, "message: this is no id of a message; give a UUID") from None


async def _name(request: Request, name: str, *, needed: bool = True) -> str:
    """Read a name: as a page has packed it, every character of it, or as somebody has typed it."""
    packed = (await fields(request)).get(f"packed-{name}")
    if packed is None:
        return await _field(request, name, needed=needed, longest=MAX_TEXT_BYTES)
    found = unpacked_text(packed)
    if not found:
        raise HTTPException(422, f"{name}: it is missing")
    return found


async def _moment(request: Request, name: str) -> datetime | None:
    text = await _field(request, name, needed=False)
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        raise HTTPException(422, f"{name}: {text!r} is no time") from None


async def _field(request: Request, name: str, *, needed: bool = True, longest: int = _LONGEST) -> str:
    value = (await fields(request)).get(name, "")
    if len(value) > longest or not is_line(value):
        raise HTTPException(422, f"{name}: give up to {longest} characters of printable text")
    if needed and not value.strip():
        raise HTTPException(422, f"{name}: it is missing")
    return value.strip()


def _actor(person: Person) -> str:
    return f"console: {printable(person.name)}"
