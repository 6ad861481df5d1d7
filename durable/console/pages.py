"""The pages. Each is made whole; a part of the overview is loaded again by htmx."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from durable.console import shown, tracing
from durable.console.access import SESSION_SECONDS, Authorize, Person, Role, Tokens, cookie_name
from durable.console.filters import chosen_filters
from durable.console.packing import packed, unpacked_text
from durable.console.reading import UNREAD, Feed, Letter, Overview, Reading, why_unread
from durable.console.runs import Runs
from durable.console.security import (
    FORM_COOKIE,
    FORM_FIELD,
    check_form,
    fields,
    form_secret,
    home,
    redirect,
    set_cookie,
)
from durable.console.shown import moment_of
from durable.errors import StorageUnavailable
from durable.grammar import with_article
from durable.listed import SHOWN, Listed
from durable.messages.validation import MAX_TEXT_BYTES
from durable.storage import receipts
from durable.storage.dead_letters import Selection
from durable.storage.gauges import MOST_COUNTED
from durable.storage.receipts import Sent
from durable.transports.addresses import canonical_name
from durable.version import __version__

Page = Callable[[Request, Person], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

_FILTERS: Final = ("fingerprint", "side", "message_type", "exception_type", "address", "key", "text", "since", "until")
_MOST_STREAMS: Final = 200
_LIVE_SECONDS: Final = 2.0
_STREAM_SECONDS: Final = 6.0  # for so long a server may wait for it when it ends


class Pages:
    """The pages of one console."""

    def __init__(
        self, service: str, reading: Reading, runs: Runs, authorize: Authorize, services: Mapping[str, Reading]
    ) -> None:
        self._service = service
        self._reading = reading
        self._services = services
        self._feed = Feed(reading)
        self._streams = 0
        self._is_checked, self._checking = False, asyncio.Lock()
        self._runs = runs
        self._authorize = authorize
        self._templates = Environment(
            loader=PackageLoader("durable.console"),
            autoescape=True,
            finalize=shown.harmless,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "age": shown.age,
            "address": shown.address,
            "moment": shown.moment,
            "count": shown.count,
            "body": shown.body,
            "packed": packed,
            "is_encrypted": shown.is_encrypted,
            "editable": shown.editable,
            "json": shown.as_json,
            "seconds": shown.seconds,
            "plots": shown.flow_plots,
        }
        self._templates.globals |= {
            "service": service,
            "has_services": bool(services),
            "has_login": isinstance(authorize, Tokens),
            "version": __version__,
            "most": MOST_COUNTED,
            "page_size": SHOWN,
            "longest_filter": MAX_TEXT_BYTES,
            "Role": Role,
        }

    # ------------------------------------------------------------------ coming in

    def asks(self, role: Role, page: Page) -> Endpoint:
        """A page for people of this role: others are asked who they are, or told why not."""

        async def endpoint(request: Request) -> Response:
            person = await self._authorize(request)
            if person is None:
                return self._stranger(request)
            if request.method == "POST":
                await check_form(request)
            if person.role < role:
                raise HTTPException(
                    403, f"{person.name} is {with_article(person.role.name.lower())} here, and may not do this"
                )
            await self._check()
            return await page(request, person)

        return endpoint

    async def _check(self) -> None:
        """Compare the tables with this version, once: a page of a database that is away says that better."""
        async with self._checking:
            if not self._is_checked:
                with suppress(StorageUnavailable):
                    await self._reading.check()
                    self._is_checked = True

    def _stranger(self, request: Request) -> Response:
        if isinstance(self._authorize, Tokens) and "text/html" in request.headers.get("accept", ""):
            return redirect(request, "login")
        text = "Show a token." if isinstance(self._authorize, Tokens) else "Log in to the application first."
        return self.render(request, "message.html", None, status=401, title="Who are you?", text=text)

    async def login(self, request: Request) -> Response:
        """Show the login, and take its token."""
        if not isinstance(self._authorize, Tokens):
            raise HTTPException(404, "the application has a login of its own")
        if request.method == "GET":
            return self.render(request, "login.html", None, error="")
        await check_form(request)
        if self._authorize.is_closed(request):
            return self.render(
                request, "login.html", None, status=429, error="Too many wrong tokens; wait for a minute."
            )
        cookie = self._authorize.log_in(request, (await fields(request)).get("token", ""))
        if cookie is None:
            return self.render(request, "login.html", None, status=401, error="This is nobody's token.")
        response = redirect(request, "overview")
        set_cookie(request, response, cookie_name(request), cookie, SESSION_SECONDS)
        return response

    async def logout(self, request: Request) -> Response:
        await check_form(request)
        response = redirect(request, "login")
        response.delete_cookie(cookie_name(request), path=home(request) or "/")
        if isinstance(self._authorize, Tokens):
            self._authorize.log_out(request)
        return response

    # ------------------------------------------------------------------ looking

    async def overview(self, request: Request, person: Person) -> Response:
        """The whole page, or its live part for htmx."""
        if request.headers.get("hx-request") == "true":
            return self.render(request, "_live.html", person, overview=await self._feed.overview(person))
        return self.render(request, "overview.html", person, overview=await self._reading.overview(person))

    async def live(self, request: Request, person: Person) -> Response:
        """Stream the live part of the overview as server-sent events, for as long as the person is let in.

        A stream ends after a while, and the page opens another: so no server waits for an open page when it ends.
        """
        if self._streams >= _MOST_STREAMS:
            raise HTTPException(503, "too many pages follow this service already; load the page again by hand")

        async def events() -> AsyncIterator[str]:
            self._streams += 1
            ends = time.monotonic() + _STREAM_SECONDS
            try:
                yield "retry: 500\n\n"
                while (known := await self._authorize(request)) is not None and time.monotonic() < ends:
                    yield _event(await self._live_part(request, known))
                    await asyncio.sleep(_LIVE_SECONDS)
            finally:
                self._streams -= 1

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _live_part(self, request: Request, person: Person) -> str:
        try:
            overview = await self._feed.overview(person)
        except StorageUnavailable as error:
            return self._text(request, "_away.html", person, text=str(error))
        return self._text(request, "_live.html", person, overview=overview)

    async def handlers(self, request: Request, person: Person) -> Response:
        """Show each handler, and the keys that are parked."""
        overview = await self._reading.overview(person)
        rows = Listed.of(self._reading.handlers(overview), page=_page(request, "handlers"))
        keys = await self._reading.keys(person, _page(request, "keys"))
        return self.render(request, "handlers.html", person, rows=rows, keys=keys, overview=overview)

    async def services(self, request: Request, person: Person) -> Response:
        """Show the state of each service, also of those whose databases are away."""
        states = await asyncio.gather(*(_state(reading, person) for reading in self._services.values()))
        found = dict(zip(self._services, states, strict=True))
        return self.render(request, "services.html", person, services=found, home=home(request))

    async def groups(self, request: Request, person: Person) -> Response:
        found = Listed.of(await self._reading.groups(person), page=_page(request))
        return self.render(request, "groups.html", person, groups=found)

    async def letters(self, request: Request, person: Person) -> Response:
        """One page of dead letters, the newest first."""
        chosen = chosen_filters(request, _FILTERS)
        if "text" in chosen and person.role < Role.OPERATOR:
            raise HTTPException(403, f"text: {person.name} is a viewer here, and may not search in contents")
        before, now = request.query_params.get("before", ""), datetime.now(UTC)
        times = {name: moment_of(name, chosen[name], now) for name in ("since", "until") if name in chosen}
        place = {"address": canonical_name(chosen["address"])} if "address" in chosen else {}
        selection = Selection(**chosen | times | place)  # type: ignore[arg-type]
        number = int(before) if before.isascii() and before.isdigit() and len(before) < 19 else None
        found = await self._reading.page(person, selection, number)
        look = await self._reading.survey(selection) if selection.is_narrowed else None
        survey = look.found if look is not None else None
        return self.render(
            request,
            "letters.html",
            person,
            letters=found[:SHOWN],
            chosen=chosen,
            names=_FILTERS,
            following=found[SHOWN - 1].letter_id if len(found) > SHOWN else None,
            survey=survey,
            uncounted=look.refusal if look is not None else "",
            selection=replace(selection, up_to=survey.newest) if survey is not None else None,
        )

    async def letter(self, request: Request, person: Person) -> Response:
        found = await self.found_letter(request, person)
        return self.render(
            request,
            "letter.html",
            person,
            found=found,
            shows_body=person.role >= Role.OPERATOR,
            is_checked=self._reading.handles(found.letter.summary.message_type),
        )

    async def found_letter(self, request: Request, person: Person) -> Letter:
        """Find the letter of a path. Raises HTTPException (404)."""
        found = await self._reading.letter(person, request.path_params["letter"])
        if found is None:
            raise HTTPException(404, "there is no such dead letter: it may have been purged")
        return found

    async def message_search(self, request: Request, person: Person) -> Response:
        """Find a message by its id, and show its places; find those of a conversation or a key, in all services."""
        asked = {"id": "", "conversation": "", "key": ""} | chosen_filters(request, ("id", "conversation", "key"))
        services = self._services or {self._service: self._reading}
        before = request.query_params.get("before", "")
        found, way = None, None
        if asked["id"]:
            wanted = _uuid("id", asked["id"])
            asked["id"], found = str(wanted), await self._reading.message(person, wanted)
            led = [each.correlation_id for each in found.standings if each.correlation_id is not None]
            if led:
                way = await tracing.conversation(services, led[0], _begun(led[0]))
        elif asked["conversation"]:
            correlation_id = _uuid("conversation", asked["conversation"])
            way = await tracing.conversation(services, correlation_id, _begun(correlation_id))
        elif asked["key"]:
            way = await tracing.of_key(services, asked["key"], datetime.now(UTC), _sent_before(before))
        steps = None if way is None else Listed.of(way.steps, page=_page(request, first=way.page_of(asked["id"])))
        return self.render(
            request,
            "message_search.html",
            person,
            asked=asked,
            before=before,
            found=found,
            way=way,
            steps=steps,
            most=tracing.MOST_STEPS,
            home=home(request),
        )

    async def scheduled(self, request: Request, person: Person) -> Response:
        found = await self._reading.scheduled(person)
        return self.render(
            request,
            "scheduled.html",
            person,
            schedules=Listed.of(found.schedules, page=_page(request, "schedules")),
            messages=Listed.of(found.messages, page=_page(request, "messages")),
            paused_since=found.paused_since,
        )

    async def run(self, request: Request, person: Person) -> Response:
        progress = self._runs.find(request.path_params["name"])
        if progress is None:
            raise HTTPException(404, "there is no such run in this process: it may have been restarted")
        part = "_run.html" if request.headers.get("hx-request") == "true" else "run.html"
        return self.render(request, part, person, progress=progress)

    async def circuits(self, request: Request, person: Person) -> Response:
        """List the circuits; after a resume that has left a park, say so."""
        found = await self._reading.circuits(person, _page(request))
        overview = await self._reading.overview(person)
        kind, key = request.query_params.get("kind"), request.query_params.get("packed-key")
        left = await self._reading.park(person, kind, unpacked_text(key)) if kind and key else None
        return self.render(request, "circuits.html", person, circuits=found, overview=overview, left=left)

    async def nodes(self, request: Request, person: Person) -> Response:
        found = Listed.of((await self._reading.overview(person)).nodes, page=_page(request))
        return self.render(request, "nodes.html", person, nodes=found)

    # ------------------------------------------------------------------ making

    def render(
        self, request: Request, template: str, person: Person | None, *, status: int = 200, **values: Any
    ) -> Response:
        response = HTMLResponse(self._text(request, template, person, **values), status)
        secret = form_secret(request)
        if request.cookies.get(FORM_COOKIE) != secret:
            set_cookie(request, response, FORM_COOKIE, secret)
        return response

    def _text(self, request: Request, template: str, person: Person | None, **values: Any) -> str:
        given = {"form_field": FORM_FIELD, "form_secret": form_secret(request), "here": request.url.path, **values}
        return shown.labelled(self._templates.get_template(template).render(request=request, person=person, **given))


def _page(request: Request, name: str = "page", first: int = 1) -> int:
    """Return the number of the page of a list that is asked for."""
    text = request.query_params.get(name, "")
    return int(text) or first if text.isascii() and text.isdigit() and len(text) < 7 else first


def _uuid(name: str, text: str) -> UUID:
    try:
        return UUID(text.strip())
    except ValueError:
        raise HTTPException(422, f"{name}: this is no id of a message; give a UUID") from None


def _sent_before(text: str) -> Sent | None:
    """Read the message before which others were sent, as a link names it. Raises HTTPException (422)."""
    if not text:
        return None
    sent_at, _, message_id = text.partition("_")
    try:
        return Sent(datetime.fromisoformat(sent_at).astimezone(UTC), UUID(message_id))
    except (ValueError, OverflowError):
        raise HTTPException(422, "before: this link is not from here: search for the key again") from None


def _begun(correlation_id: UUID) -> datetime:
    """Return when a conversation began, by the id of its first message; a while ago where that does not tell."""
    now = datetime.now(UTC)
    begun = receipts.made_after([correlation_id], tracing.SPAN / 24)
    return begun if begun is not None and begun < now else now - tracing.SPAN


def _event(text: str) -> str:
    """Write a server-sent event."""
    return "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"


async def _state(reading: Reading, person: Person) -> Overview | str:
    """Return the state of a service, or why it cannot be read."""
    try:
        return await reading.overview(person)
    except UNREAD as error:
        return why_unread(error)
