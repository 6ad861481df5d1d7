"""/metrics for Prometheus and /health for whoever restarts or alerts: an ASGI app, mounted or on a port of its own.

    GET /metrics         the process and its service, with whatever else the application has registered
    GET /health          200 or 503, and a JSON document that says why
    GET /health/ready    204, or 503: a message could be stored now, as /health/ready of the HTTP transport has it
    GET /health/live     204: the event loop answers; nothing else is asked

They tell no secrets, and everybody who reaches them may read them: they are served on loopback unless metrics_host
says otherwise.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from durable.errors import InvalidSetting
from durable.observability.metrics import process, service
from durable.observability.metrics.families import declared
from durable.observability.metrics.prometheus import expose
from durable.observability.monitor import Monitor
from durable.settings import Settings
from durable.telemetry import log
from durable.transports.base import Receiver
from durable.transports.http.server import BACKLOG, Server, Serving

_LAST_ANSWERS: Final = 1.0  # seconds for requests under way when it closes


def make_app(
    monitor: Callable[[], Monitor], receiver: Callable[[], Receiver | None], others: Collector | None = None
) -> Starlette:
    """Build the application. `receiver` returns None while nothing is stored here; `others` are further collectors."""
    return Starlette(
        routes=[
            Route("/metrics", partial(_metrics, monitor, others), methods=["GET"]),
            Route("/health", partial(_health, monitor), methods=["GET"]),
            Route("/health/ready", partial(_is_ready, receiver, asyncio.Lock()), methods=["GET"]),
            Route("/health/live", _is_live, methods=["GET"]),
        ]
    )


async def _metrics(find: Callable[[], Monitor], others: Collector | None, request: Request) -> Response:
    monitor = find()
    reading, known = await monitor.read(), declared(monitor.application)
    families = [
        *process.families(monitor.statistics(), known, datetime.now(UTC)),
        *service.families(reading, known, monitor.settings.heartbeat_stale),
    ]
    content_type, body = expose(families, request.headers.get("accept", ""), others)
    return Response(body, headers={"content-type": content_type})


async def _health(find: Callable[[], Monitor], request: Request) -> Response:
    monitor = find()
    reading, statistics = await monitor.read(), monitor.statistics()
    document = {
        "healthy": not reading.problems,
        "problems": list(reading.problems),
        "service": statistics.service,
        "node": statistics.node_id,
    }
    return JSONResponse(document, 503 if reading.problems else 200)


async def _is_ready(find: Callable[[], Receiver | None], looking: asyncio.Lock, request: Request) -> Response:
    async with looking:  # one at a time: the connections to the database are for messages
        receiver = find()
        is_ready = receiver is not None and await receiver.ready()
    return Response(status_code=204 if is_ready else 503)


async def _is_live(request: Request) -> Response:
    return Response(status_code=204)


class MetricsServer:
    """Serves the app on metrics_host and metrics_port."""

    def __init__(self, monitor: Monitor, receiver: Callable[[], Receiver | None], settings: Settings) -> None:
        self._app = make_app(lambda: monitor, receiver, REGISTRY)
        self._settings = settings
        self._serving: Serving | None = None

    async def open(self) -> None:
        """Bind and return; raises InvalidSetting when the address cannot be bound."""
        listening = self._bind()
        host, port = listening.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._serving = Serving(Server(self._app, self._settings, self.address, Counter()))
        await self._serving.begin(listening)
        log.info("metrics at %s/metrics, health at %s/health", self.address, self.address)

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.end(_LAST_ANSWERS)

    def _bind(self) -> socket.socket:
        host, port = self._settings.metrics_host, self._settings.metrics_port or 0
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
            )
        except OSError as error:
            raise InvalidSetting(
                f"metrics_port: cannot listen on {host} port {port}: {error.strerror or error}; "
                "each process needs a port of its own, and 0 is a free one"
            ) from error
