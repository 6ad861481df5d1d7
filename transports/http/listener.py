"""The receiving end of HTTP where no application serves the endpoints: they are served on a socket of their own."""

from __future__ import annotations

import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from durable.settings import Settings
from durable.transports.base import Receiver
from durable.transports.http.address import HttpAddress
from durable.transports.http.app import make_app
from durable.transports.http.exchange import Door
from durable.transports.http.server import BACKLOG, Server, Serving
from durable.transports.uris import cannot_listen


class MakeDoor(Protocol):
    """Function that makes the door of one listener: see Door."""

    def __call__(
        self, receiver: Callable[[], Receiver | None], endpoint: str, counts: Counter[str], *, allow_local: bool
    ) -> Door: ...


class HttpListener:
    """A `durable.transports.base.Listener` for one `http://` or `https://` address."""

    def __init__(
        self,
        address: HttpAddress,
        endpoint: str,
        settings: Settings,
        *,
        door: MakeDoor,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self._address = address
        self._uri = str(address)
        self._endpoint = endpoint
        self._settings = settings
        self._door = door
        self._tls = tls
        self._counts: Counter[str] = Counter(connections=0, dropped=0, batches=0, envelopes=0, calls=0, refused=0)
        self._serving: Serving | None = None

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        """The URI that peers send to; with the port that was bound, once serve() has returned."""
        return self._uri

    def statistics(self) -> Mapping[str, int]:
        """Return the counters since serve(): connections, dropped, batches, envelopes, calls, refused (requests)."""
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        """Bind and return; raises InvalidSetting when the address cannot be bound."""
        listening = self._bind()
        door = self._door(lambda: receiver, self._endpoint, self._counts, allow_local=self._address.is_local)
        app = make_app(door, self._address.path)
        self._serving = Serving(Server(app, self._settings, self._uri, self._counts, self._tls))
        await self._serving.begin(listening)

    async def close(self) -> None:
        """Accept nothing new, answer the requests under way within `drain_timeout`, and close."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.end(self._settings.drain_timeout.total_seconds())

    def _bind(self) -> socket.socket:
        host, port = self._address.host, self._address.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server(
                (host, port), family=family, backlog=BACKLOG, reuse_port=self._address.reuse_port
            )
        except OSError as error:
            raise cannot_listen(str(self._address), error, shares_port=self._address.reuse_port) from error
        # asyncio sets it only where the socket names its protocol; without it each answer waits for a delayed ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._uri = str(self._address.on_port(listening.getsockname()[1]))
        return listening
