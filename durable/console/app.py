"""The console as an ASGI app, to be mounted in any application."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from durable.bus import Bus
from durable.console.access import Authorize, Person, Role, Tokens
from durable.console.actions import Actions
from durable.console.database import DatabasePage
from durable.console.editing import Editing
from durable.console.pages import Endpoint, Page, Pages
from durable.console.pings import Pings
from durable.console.pipeline import PipelinePage
from durable.console.reading import Reading
from durable.console.recorded import Record
from durable.console.rehearsing import Rehearsals
from durable.console.runs import Runs
from durable.console.security import Home, OwnRoutes, SecureHeaders, home, secure
from durable.errors import InvalidSetting, SchemaMismatch, StorageUnavailable


class _Numbers(Convertor[int]):
    """Numbers of letters; longer ones are no addresses."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("number", _Numbers())


def console_app(
    bus: Bus,
    *others: Bus,
    authorize: Authorize | None = None,
    tokens: Mapping[str, Person] | None = None,
    app: str | None = None,
) -> Starlette:
    """Return the console of this bus's service: `app.mount("/console", console_app(bus, tokens=...))`.

    Nobody comes in without being known. `tokens`: a secret of 16 characters or more for each person, who shows it to
    the login page, or as a bearer token. `authorize`: the application's own check instead, an async function that is
    given the request and returns a Person, or None. Being on the same machine is no proof. Raises InvalidSetting when
    not exactly one of both is given, for a short token, and for two buses of one service.

    `others`: buses of other services, such as Bus("stock", url) without handlers. Each service is then served below its
    own name, and one page shows all of them.

    `app`: module and attribute of the bus, such as "app:bus": rehearsals import it in processes of their own, started
    in the folder of this process. Without it there are no rehearsals.

    What a person does is recorded with the name `console: NAME`. Replays of many letters run in this process.
    """
    if (authorize is None) == (not tokens):
        raise InvalidSetting("console: give tokens={secret: Person(...)}, or authorize=; one of them")
    known = authorize if authorize is not None else Tokens(tokens or {})
    if not others:
        return _console(bus, Reading(bus), known, app, {})
    readings = {each.service: Reading(each) for each in (bus, *others)}
    if len(readings) <= len(others):
        raise InvalidSetting("console: two of the buses are of one service; give each service once")
    consoles = {
        each.service: _console(each, readings[each.service], known, app if each is bus else None, readings)
        for each in (bus, *others)
    }

    async def begin(request: Request) -> Response:
        return RedirectResponse(f"{home(request)}/{bus.service}/services", 303)

    async def look_in_one(request: Request) -> Response:
        """Go to the console of a service, or to this page in the first one: that knows it, or tells of it."""
        path = request.path_params["path"]
        found = f"{path}/" if path in consoles else f"{bus.service}/{path}"
        return RedirectResponse(f"{home(request)}/{quote(found)}", 303)

    mounts = (Mount(f"/{name}", console) for name, console in consoles.items())
    return Starlette(
        routes=[Route("/", begin), *mounts, Route("/{path:path}", look_in_one)],
        middleware=[Middleware(SecureHeaders), Middleware(Home)],
    )


def _console(
    bus: Bus, reading: Reading, known: Authorize, app: str | None, services: Mapping[str, Reading]
) -> Starlette:
    runs = Runs()
    pages, actions = Pages(bus.service, reading, runs, known, services), Actions(bus, runs)
    editing = Editing(bus, pages, reading, Rehearsals(app, bus.settings.handler_timeout))
    record, pings = Record(bus, pages), Pings(bus, pages)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        try:
            person = await known(request)
        except HTTPException:  # of the application's own check
            person = None
        return pages.render(
            request, "message.html", person, status=error.status_code, title=f"{error.status_code}", text=error.detail
        )

    async def away(request: Request, error: Exception) -> Response:
        return pages.render(request, "away.html", None, status=503, text=str(error))

    async def outdated(request: Request, error: Exception) -> Response:
        title = "The tables are not those of this version"
        return pages.render(request, "message.html", None, status=503, title=title, text=str(error))

    async def misled(request: Request, error: Exception) -> Response:
        title = "The settings of this service are wrong"
        return pages.render(request, "message.html", None, status=503, title=title, text=str(error))

    async def broken(request: Request, error: Exception) -> Response:
        text = "Something is wrong in the console itself. The log of its process has the traceback."
        response = pages.render(request, "message.html", None, status=500, title="500", text=text)
        secure(response.headers)  # this answer passes no middleware
        return response

    def see(page: Page) -> Endpoint:
        return pages.asks(Role.VIEWER, page)

    def do(page: Page) -> Endpoint:
        return pages.asks(Role.OPERATOR, page)

    def rule(page: Page) -> Endpoint:
        return pages.asks(Role.ADMIN, page)

    return Starlette(
        routes=[
            Route("/", see(pages.overview), name="overview"),
            *([Route("/services", see(pages.services), name="services")] if services else []),
            Route("/live", see(pages.live), name="live"),
            Route("/handlers", see(pages.handlers), name="handlers"),
            Route("/login", pages.login, methods=["GET", "POST"], name="login"),
            Route("/logout", pages.logout, methods=["POST"], name="logout"),
            Route("/dead-letters", see(pages.groups), name="groups"),
            Route("/dead-letters/all", see(pages.letters), name="letters"),
            Route("/dead-letters/resolve", do(actions.resolve), methods=["POST"], name="resolve"),
            Route("/dead-letters/{letter:number}", see(pages.letter), name="letter"),
            Route("/dead-letters/{letter:number}/rehearse", do(editing.rehearse), methods=["POST"], name="rehearse"),
            Route("/dead-letters/{letter:number}/edit", rule(editing.edit), methods=["POST"], name="edit"),
            Route("/runs/{name}", see(pages.run), name="run"),
            Route("/runs/{name}/stop", do(actions.stop), methods=["POST"], name="stop"),
            Route("/messages", see(pages.message_search), name="message_search"),
            Route("/scheduled", see(pages.scheduled), name="scheduled"),
            Route("/scheduled/change", do(actions.change_scheduled), methods=["POST"], name="change_scheduled"),
            Route("/circuits", see(pages.circuits), name="circuits"),
            Route("/circuits/ping", do(pings.ping), methods=["POST"], name="ping"),
            Route("/circuits/pause", do(actions.pause), methods=["POST"], name="pause"),
            Route("/circuits/resume", do(actions.resume), methods=["POST"], name="resume"),
            Route("/nodes", see(pages.nodes), name="nodes"),
            Route("/database", see(DatabasePage(pages, bus)), name="database"),
            Route("/pipeline", see(PipelinePage(pages, bus)), name="pipeline"),
            Route("/actions", see(record.page), name="actions"),
            Route("/actions/export", rule(record.export), name="export_actions"),
            Mount("/static", StaticFiles(directory=str(files("durable.console") / "static")), name="static"),
        ],
        middleware=[Middleware(SecureHeaders), Middleware(OwnRoutes)],
        exception_handlers={
            HTTPException: refused,
            StorageUnavailable: away,
            SchemaMismatch: outdated,
            InvalidSetting: misled,
            Exception: broken,
        },
    )
