"""The console as an ASGI app, to be mounted in any application."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from durable.bus import Bus
from durable.console.access import Authorize, Person, Role, Tokens
from durable.console.actions import Actions
from durable.console.database import DatabasePage
from durable.console.pages import Endpoint, Page, Pages
from durable.console.pipeline import PipelinePage
from durable.console.reading import Reading
from durable.console.runs import Runs
from durable.console.security import SecureHeaders
from durable.errors import InvalidSetting, StorageUnavailable


def console_app(
    bus: Bus, *, authorize: Authorize | None = None, tokens: Mapping[str, Person] | None = None
) -> Starlette:
    """Return the console of this bus's service: `app.mount("/console", console_app(bus, tokens=...))`.

    Nobody comes in without being known. `tokens`: a secret of 16 characters or more for each person, who shows it to
    the login page, or as a bearer token. `authorize`: the application's own check instead, an async function that is
    given the request and returns a Person, or None. Being on the same machine is no proof. Raises InvalidSetting when
    not exactly one of both is given, and for a short token.

    What a person does is kept with the name `console: NAME`. Replays of many letters run in this process.
    """
    if (authorize is None) == (not tokens):
        raise InvalidSetting("console: give tokens={secret: Person(...)}, or authorize=; one of them")
    known = authorize if authorize is not None else Tokens(tokens or {})
    runs = Runs()
    pages, actions = Pages(bus.service, Reading(bus), runs, known), Actions(bus, runs)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return pages.render(
            request, "message.html", None, status=error.status_code, title=f"{error.status_code}", text=error.detail
        )

    async def away(request: Request, error: Exception) -> Response:
        return pages.render(request, "away.html", None, status=503, text=str(error))

    def see(page: Page) -> Endpoint:
        return pages.asks(Role.VIEWER, page)

    def do(page: Page) -> Endpoint:
        return pages.asks(Role.OPERATOR, page)

    return Starlette(
        routes=[
            Route("/", see(pages.overview), name="overview"),
            Route("/login", pages.login, methods=["GET", "POST"], name="login"),
            Route("/logout", pages.logout, methods=["POST"], name="logout"),
            Route("/dead-letters", see(pages.groups), name="groups"),
            Route("/dead-letters/all", see(pages.letters), name="letters"),
            Route("/dead-letters/resolve", do(actions.resolve), methods=["POST"], name="resolve"),
            Route("/dead-letters/{letter:int}", see(pages.letter), name="letter"),
            Route("/runs/{name}", see(pages.run), name="run"),
            Route("/runs/{name}/stop", do(actions.stop), methods=["POST"], name="stop"),
            Route("/messages", see(pages.message_search), name="message_search"),
            Route("/scheduled", see(pages.scheduled), name="scheduled"),
            Route("/scheduled/change", do(actions.change_scheduled), methods=["POST"], name="change_scheduled"),
            Route("/circuits", see(pages.circuits), name="circuits"),
            Route("/circuits/pause", do(actions.pause), methods=["POST"], name="pause"),
            Route("/circuits/resume", do(actions.resume), methods=["POST"], name="resume"),
            Route("/nodes", see(pages.nodes), name="nodes"),
            Route("/database", see(DatabasePage(pages, bus)), name="database"),
            Route("/pipeline", see(PipelinePage(pages, bus)), name="pipeline"),
            Mount("/static", StaticFiles(directory=str(files("durable.console") / "static")), name="static"),
        ],
        middleware=[Middleware(SecureHeaders)],
        exception_handlers={HTTPException: refused, StorageUnavailable: away},
    )
