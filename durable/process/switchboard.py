"""The transports of a process, by the schemes of its addresses: the only module that builds concrete transports."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Final

from durable.application.application import Application, Listening, Transports
from durable.envelope import NodeId
from durable.errors import needs
from durable.requests.outcomes import Outcomes
from durable.settings import Settings
from durable.transports.base import Directory, Transport
from durable.transports.rabbitmq import sharing
from durable.transports.rabbitmq.sharing import Named
from durable.transports.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from durable.transports.http.transport import HttpTransport

_RABBITMQ: Final = "rabbitmq://"


class Switchboard(Transports):
    """Transports of an application: TCP, its own, and those whose libraries may not be installed."""

    def __init__(
        self,
        application: Application,
        settings: Settings,
        *,
        node_id: Callable[[], NodeId],
        directory: Directory,
        outcomes: Outcomes,
    ) -> None:
        service, offers = application.service, application.offers
        tcp = TcpTransport(settings, service, node=node_id, provider=offers, directory=directory)
        optional = {"http": lambda: self.http, "https": lambda: self.http, "rabbitmq": self._rabbitmq}
        super().__init__([tcp, *application.transports], optional)
        self._application = application
        self._settings = settings
        self._directory = directory
        self._outcomes = outcomes

    @cached_property
    def http(self) -> HttpTransport:
        """Raises InvalidSetting when what it is built on is not installed."""
        with needs("http://", extra="http"):
            from durable.transports.http.transport import HttpTransport
        return HttpTransport(
            self._settings,
            service=self._application.service,
            messages=self._application.handled_classes,
            outcomes=self._outcomes,
            provider=self._application.offers,
            directory=self._directory,
        )

    def _rabbitmq(self) -> Transport:
        with needs("rabbitmq://", extra="rabbitmq"):
            from durable.transports.rabbitmq.transport import RabbitTransport
        service, messages = self._application.service, self._application.handled_classes
        return RabbitTransport(self._settings, service=service, messages=messages)

    def check_listener(self, added: Listening) -> None:
        """Raise InvalidSetting for a listener that cannot be beside those that are declared."""
        if added.uri.startswith(_RABBITMQ):
            others = [Named(*each) for each in self._application.listeners if each.uri.startswith(_RABBITMQ)]
            sharing.check(Named(*added), others, self._settings, self._application.service)
