"""The ASGI app of a service: every endpoint, to be mounted in an application or served by itself.

    POST /batches            from senders of durable
    POST /ping               could a batch be stored now?
    POST /messages/{type}    one message, from any client
    GET  /messages/{id}      what became of a message
    PUT  /requests/{id}      one message whose answer is kept, and GET of the answer, from any client
    POST /messages           one CloudEvent, from any client
    POST /calls/{s}/{m}      a call of a method of a service
    GET  /offers             the services that can be called here, and GET /directory all that are known
    GET  /openapi.json       all this, described
    GET  /health/live        this process answers; open to all, without details
    GET  /health/ready       it could store something now; open to all, without details

Whatever is wrong is answered as a problem (RFC 9457), also what no endpoint answers for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router

from durable.transports.http import batches as http_batches
from durable.transports.http import calls as http_calls
from durable.transports.http import messages as http_messages
from durable.transports.http import openapi as http_openapi
from durable.transports.http import receipts as http_receipts
from durable.transports.http import requests as http_requests
from durable.transports.http.answers import SignedAnswers
from durable.transports.http.exchange import RETRY_SOON, Door
from durable.transports.http.problems import problem

_ENDPOINTS = (http_batches, http_receipts, http_requests, http_messages, http_calls, http_openapi)


def make_app(door: Door, path: str = "") -> Starlette:
    """The app, its routes below this path."""
    routes: list[BaseRoute] = [
        Route("/health/live", _is_live, methods=["GET"]),
        Route("/health/ready", partial(_is_ready, door, asyncio.Lock()), methods=["GET"]),
    ]
    for module in _ENDPOINTS:
        routes += module.routes(door)
    if path:
        routes = [Mount(path, app=Router(routes, redirect_slashes=False))]
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: partial(_refuse, door),
        Exception: _fail,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(SignedAnswers)])
    app.router.redirect_slashes = False
    return app


async def _is_live(request: Request) -> Response:
    return Response(status_code=204)


async def _is_ready(door: Door, looking: asyncio.Lock, request: Request) -> Response:
    receiver = door.receiver()
    async with looking:  # one at a time: whoever asks here, unknown, must not occupy the connections to the database
        if receiver is None or not await receiver.ready():
            return problem(503, "nothing can be stored now", RETRY_SOON)
    return Response(status_code=204)


async def _refuse(door: Door, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    door.counts["refused"] += 1
    return problem(error.status_code, error.detail, error.headers)


async def _fail(request: Request, error: Exception) -> Response:
    """The server logs the error; the client learns nothing of it."""
    return problem(500, "a fault of this service")
