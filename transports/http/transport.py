"""HTTP: makes senders, listeners and mountable apps for `http://` and `https://` URIs.

    http_wire                    a batch and its outcomes as bytes
    http_auth                    the secret as a signature or a bearer token, of a request and of its answer
    http_local                   requests without a secret
    http_headers, cloudevents    one message from any client
    http_address                 URIs
    http_client, http_sender     the sending end, on httpx; http_pool keeps its connections; http_caller calls
    http_encryption              the certificates of both ends
    http_exchange                what the endpoints share
    http_batches, http_messages  the endpoints, on Starlette; http_openapi describes them
    http_receipts, http_requests the outcomes of messages, and the answers to requests
    http_calls                   calls of services, and lists of them
    http_app                     all of them as one ASGI app
    http_server, http_listener   the app on a socket of its own, by uvicorn

Those of the first five lines decide and do no I/O; the others wait and act.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import ASGIApp

from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.telemetry import log
from durable.transports import peers
from durable.transports.base import Directory, Provider, Receiver
from durable.transports.http.address import SCHEMES, HttpAddress, parse, parse_destination, parse_source
from durable.transports.http.app import make_app
from durable.transports.http.caller import MOST_CONNECTIONS, HttpCaller
from durable.transports.http.client import HttpClient
from durable.transports.http.encryption import Encryption
from durable.transports.http.exchange import Door, Outcomes
from durable.transports.http.listener import HttpListener
from durable.transports.http.sender import HttpSender
from durable.transports.idle import IdleConnections
from durable.transports.plaintext import require_plaintext_allowed

__all__ = ["HttpCaller", "HttpListener", "HttpSender", "HttpTransport"]

_NOT_ENCRYPTED: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # of http:// senders: it trusts nobody


def _not_encrypted() -> ssl.SSLContext:
    return _NOT_ENCRYPTED


class HttpTransport:
    """A `durable.transports.base.Transport`.

    `service` is this service's name, and `messages` returns the classes that it handles, by message type. `outcomes`
    tells what became of messages; without it no client can ask. `provider` has the services that can be called here,
    and `directory` all that this service knows.
    """

    schemes: tuple[str, ...] = SCHEMES

    def __init__(
        self,
        settings: Settings,
        *,
        service: str,
        messages: Callable[[], Mapping[str, type]],
        outcomes: Outcomes | None = None,
        provider: Provider | None = None,
        directory: Directory | None = None,
    ) -> None:
        self._settings = settings
        self._idle = IdleConnections(settings.idle_connections)
        self._provider = provider
        self._directory = directory
        self._service = service
        self._messages = messages
        self._outcomes = outcomes
        self._encryption = Encryption(settings)
        peers.check(settings)

    def check(self, uri: str) -> None:
        """Raise InvalidSetting unless this is a URI of a host, and perhaps a port and a path; and for one of another
        host that is not encrypted.
        """
        address = parse(uri)
        if not (address.is_encrypted or address.is_local):
            require_plaintext_allowed(self._settings, uri, "https://")

    def resolve(self, uri: str, message_type: str) -> str:
        """Return `uri` as every sender writes it, without options of listeners.

        Raises InvalidSetting for port 0, and when the secret would be readable on the way.
        """
        address = parse_destination(uri)
        if self._settings.http_auth == "bearer":
            self._credentials_for(address)
        return str(address)

    def sender(self, destination: str) -> HttpSender:
        return HttpSender(self._client(destination), self._settings, idle=self._idle)

    def caller(self, uri: str) -> HttpCaller:
        """Return a caller of the services at this address."""
        self.check(uri)
        return HttpCaller(self._client(uri, most_connections=MOST_CONNECTIONS), self._settings)

    def _client(self, uri: str, *, most_connections: int | None = None) -> HttpClient:
        address = parse_destination(uri)
        tls = self._encryption.for_senders if address.is_encrypted else _not_encrypted
        tls()  # an unusable file is an invalid setting, and no failure of a peer
        return HttpClient(
            address,
            self._settings,
            self._credentials_for(address),
            tls,
            service=self._service,
            most_connections=most_connections,
        )

    def listener(self, uri: str, endpoint: str) -> HttpListener:
        """Port 0 listens on a free port; the listener's `address` then says which."""
        address = parse_source(uri)
        if not address.is_local and not peers.has_secrets(self._settings):
            raise InvalidSetting(
                f"shared_secret: {uri} can be reached from other machines, so peers must show a secret; set it to one"
                " that they all know, or listen on 127.0.0.1"
            )
        tls = self._encryption.for_listeners if address.is_encrypted else None
        if tls is not None:
            tls()
        return HttpListener(address, endpoint, self._settings, door=self._door, tls=tls)

    def app(
        self,
        endpoint: str,
        receiver: Callable[[], Receiver | None],
        counts: Counter[str] | None = None,
        *,
        allow_local: bool = False,
    ) -> ASGIApp:
        """The endpoints as an ASGI app, to be mounted in an application.

        What comes in is stored under the key `endpoint`, and counted in `counts`. While `receiver` returns None the app
        answers 503. Without a secret it takes requests from this machine if `allow_local`, and otherwise none.
        """
        counts = Counter() if counts is None else counts
        counts.update(batches=0, envelopes=0, calls=0, refused=0)
        if not allow_local and not peers.has_secrets(self._settings):
            log.warning(
                "bus.asgi() has no secret and refuses every request; set shared_secret or give allow_local=True"
            )
        return make_app(self._door(receiver, endpoint, counts, allow_local=allow_local))

    def _door(
        self, receiver: Callable[[], Receiver | None], endpoint: str, counts: Counter[str], *, allow_local: bool
    ) -> Door:
        return Door(
            receiver,
            endpoint,
            self._service,
            self._settings,
            self._messages,
            allow_local,
            counts=counts,
            outcomes=self._outcomes,
            provider=self._provider,
            directory=self._directory,
        )

    def _credentials_for(self, address: HttpAddress) -> peers.Credentials | None:
        """Return the secret for this address; raises InvalidSetting when it must not be sent there."""
        credentials = peers.credentials_for(self._settings, str(address), self._service)
        if credentials is not None and self._settings.http_auth == "bearer":
            if not (address.is_encrypted or self._settings.allow_plaintext):
                raise InvalidSetting(
                    f"http_auth: {address} is not encrypted, so everybody on the way could read the secret, and answer"
                    " for the peer; use https://, or http_auth=hmac"
                )
            value, name = credentials.secret, "peers" if credentials.key else "shared_secret"
            if not value.isascii() or not value.isprintable() or " " in value:
                raise InvalidSetting(f"{name}: with http_auth=bearer it must be of visible ASCII characters")
        return credentials
