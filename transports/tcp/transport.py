"""TCP and Unix sockets: makes senders and listeners for `tcp://` and `unix://` URIs.

    frames              what the two ends can say
    wire                the same as bytes
    conversation        who may say what when, and who owes what
    proofs              how each end shows that it knows the secret
    address, unix       URIs, and how they are bound
    entrance            what each end must show: a certificate, a proof
    stream              frames over an asyncio connection, with deadlines
    dialer              the connection to a destination, opened anew after it has ended
    sender, caller      the two kinds of it: for batches, for calls
    calling             what a connection for calls says
    connecting, spoke   what a connection to a directory says, and the connection
    listener            the other end of all; answering has its calls, connected its directory

Frames, wire, conversation, proofs, calling and connecting decide and do no
I/O; the others wait and act.
"""

from __future__ import annotations

from collections.abc import Callable

from durable.settings import Settings
from durable.transports.base import Directory, Provider, Services
from durable.transports.idle import IdleConnections
from durable.transports.tcp.address import SCHEMES, parse, parse_destination
from durable.transports.tcp.caller import TcpCaller
from durable.transports.tcp.entrance import Entrances
from durable.transports.tcp.listener import TcpListener
from durable.transports.tcp.sender import TcpSender
from durable.transports.tcp.spoke import TcpSpoke

__all__ = ["TcpCaller", "TcpListener", "TcpSender", "TcpSpoke", "TcpTransport"]


class TcpTransport:
    """A `durable.transports.base.Transport`.

    `service` and `node` are how this process introduces itself to its peers, for their logs; the node's id may be
    known only later, and is asked for at each handshake when it is given as a function. `provider` has the services
    that can be called at its listeners, and `directory` those that connected peers are told of.
    """

    schemes: tuple[str, ...] = SCHEMES

    def __init__(
        self,
        settings: Settings,
        service: str,
        node: Callable[[], int] | int,
        provider: Provider | None = None,
        directory: Directory | None = None,
    ) -> None:
        self._settings = settings
        self._service = service
        self._node = node if callable(node) else lambda: node
        self._services = Services(provider, directory)
        self._entrances = Entrances(settings, service)
        self._idle = IdleConnections(settings.idle_connections)

    def check(self, uri: str) -> None:
        """Raise InvalidSetting unless this URI names a port or the path of a Unix socket, and TLS can be used there."""
        self._entrances.of_sender(parse(uri))

    def resolve(self, uri: str, message_type: str) -> str:
        """Return `uri` as every sender writes it, without options of listeners. Raises InvalidSetting for port 0."""
        return str(parse_destination(uri))

    def sender(self, destination: str) -> TcpSender:
        address = parse_destination(destination)
        entrance = self._entrances.of_sender(address)
        return TcpSender(address, entrance, self._settings, self._service, self._node, idle=self._idle)

    def listener(self, uri: str, endpoint: str) -> TcpListener:
        """Port 0 listens on a free port; the listener's `address` then says which."""
        address = parse(uri)
        entrance = self._entrances.of_listener(address)
        return TcpListener(
            address,
            entrance,
            endpoint,
            self._settings,
            self._service,
            self._node,
            services=self._services,
        )

    def caller(self, uri: str) -> TcpCaller:
        """Return a caller of the services at this address."""
        address = parse_destination(uri)
        return TcpCaller(address, self._entrances.of_sender(address), self._settings, self._service, self._node)

    def spoke(self, uri: str) -> TcpSpoke:
        """Return the connections to the directory at this address."""
        address = parse_destination(uri)
        return TcpSpoke(address, self._entrances.of_sender(address), self._settings, self._service, self._node)
