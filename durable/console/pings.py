"""Ping of a destination on demand: the same that its sending agent sends while it is latched."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from durable.bus import Bus
from durable.console.access import Person
from durable.console.packing import unpacked_text
from durable.console.pages import Pages
from durable.console.security import fields
from durable.errors import DurableError
from durable.storage import known_names
from durable.storage.circuits import CircuitKind


class Pings:
    """Pings from the process of the console, with the settings of its bus."""

    def __init__(self, bus: Bus, pages: Pages) -> None:
        self._bus = bus
        self._pages = pages

    async def ping(self, request: Request, person: Person) -> Response:
        """Tell whether a destination takes messages now. It changes nothing: the sending agents ping for themselves."""
        key = unpacked_text((await fields(request)).get("packed-key", ""))
        known = await self._bus.runtime.database.transaction(known_names.read, CircuitKind.DESTINATION, [key])
        if key not in known and key not in self._bus.application.destinations():
            raise HTTPException(422, "key: no message waits for this destination, and none is declared")
        fault = await self._fault(key)
        title = f"{key} takes messages" if fault is None else f"{key} takes no messages"
        return self._pages.render(
            request,
            "message.html",
            person,
            title=title,
            text=fault or "The ping travelled the whole way of a batch. A latched sending agent pings by itself.",
        )

    async def _fault(self, address: str) -> str | None:
        longest = self._bus.settings.connect_timeout + self._bus.settings.send_timeout
        try:
            async with asyncio.timeout(longest.total_seconds()):
                async with self._bus.runtime.transports.of(address).sender(address) as sender:
                    await sender.ping()
        except TimeoutError:
            return f"{address}: no answer within {longest.total_seconds():g} seconds"
        except DurableError as error:
            return str(error)
        return None
