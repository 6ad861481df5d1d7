"""One dead letter, rehearsed or replayed with another body."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from durable.bus import Bus
from durable.console.access import Person, Role
from durable.console.packing import is_line
from durable.console.pages import Pages
from durable.console.reading import Reading
from durable.console.rehearsing import RehearsalFailed, Rehearsals
from durable.console.security import fields, redirect
from durable.console.shown import as_edited
from durable.dead_letters import bodies
from durable.errors import DurableError, InvalidMessage
from durable.redaction import printable
from durable.storage import actions, dead_letters
from durable.storage.actions import Action
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection


class Editing:
    """The edits and rehearsals of a letter."""

    def __init__(self, bus: Bus, pages: Pages, reading: Reading, rehearsals: Rehearsals) -> None:
        self._bus = bus
        self._pages = pages
        self._reading = reading
        self._rehearsals = rehearsals

    async def rehearse(self, request: Request, person: Person) -> Response:
        """Show what a replay would do, with the body of the form if it has one; nothing is stored or sent."""
        letter = await self._letter(request, person)
        body = (await fields(request)).get("body")
        if body is not None and person.role < Role.ADMIN:
            raise HTTPException(403, f"{person.name} is an operator here, and may rehearse letters as they are")
        number = letter.summary.letter_id
        try:
            told = await self._rehearsals.run(number, body)
        except RehearsalFailed as error:
            raise HTTPException(409, f"letter {number} was not rehearsed: {error}") from error
        return self._pages.render(request, "rehearsal.html", person, letter=letter.summary, told=told, body=body)

    async def edit(self, request: Request, person: Person) -> Response:
        """Replay a letter with the body of the form, which its class must accept. The old body stays with it."""
        letter = await self._letter(request, person)
        form = await fields(request)
        number, reason = letter.summary.letter_id, form.get("reason", "").strip()
        if not reason or len(reason) > 500 or not is_line(reason):
            raise HTTPException(
                422,
                "reason: give up to 500 characters of printable text; it is kept with the letter. Go back: the form "
                "still has your text",
            )
        body, actor = self._encoded(letter, form.get("body", "")), f"console: {printable(person.name)}"
        action = Action(actor=actor, verb="edit", target=f"dead letters: letter {number}", reason=reason)
        replaying = partial(dead_letters.replay, actor=actor, reason=reason, body=body)
        change, only = actions.recorded(replaying, action), Selection(letters=[number])
        resolved = await self._bus.runtime.database.transaction(change, only, LetterRange(number - 1, number, 1))
        if not resolved.done:
            raise HTTPException(409, f"letter {number} was not replayed: it is resolved, or its message waits already")
        return redirect(request, "letter", letter=str(number))

    async def _letter(self, request: Request, person: Person) -> DeadLetter:
        return (await self._pages.found_letter(request, person)).letter

    def _encoded(self, letter: DeadLetter, text: str) -> bytes:
        """Encode the new body as its class is encoded, where this service handles it. Raises HTTPException."""
        limit, application = self._bus.settings.max_message_bytes, self._bus.application
        known = application if letter.summary.message_type in application.by_type() else None
        try:
            body = bodies.edited(letter, as_edited(letter, text), known)
            if len(body) > limit:
                raise InvalidMessage(f"the body has {len(body)} bytes; max_message_bytes is {limit}")
            return bodies.sealed_as(letter, body, application.ring)
        except (DurableError, msgspec.DecodeError) as error:
            raise HTTPException(422, f"body: {error}. Go back: the form still has your text") from error
