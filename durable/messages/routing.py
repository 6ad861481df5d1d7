"""Routes of messages to destinations. A command has one, an event any number.

send()      the destination given with `to=`; else its route; else this service's own handler;
            else its only subscriber; else an error that says what to do
publish()   every subscriber, and this service's own handler; nobody is an answer too
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from durable.errors import RoutingError
from durable.grammar import several
from durable.messages.ordering import OrderingRules
from durable.messages.registry import class_name
from durable.messages.upcasting import newer_types
from durable.redaction import printable

LOCAL = "local"
"""The destination of a message whose handler is in the same service: its own inbox, without any transport."""


class Routes:
    """The declared routes of one service."""

    def __init__(self) -> None:
        self._commands: dict[str, str] = {}
        self._subscribers: dict[str, list[str]] = {}
        self._local: set[str] = set()
        self.answers: dict[str, str] = {}
        """The address of this service for answers, by the types that it expects."""
        self.places = OrderingRules()
        """The declarations of order and fairness."""

    def route(self, message_type: str, to: str) -> None:
        known = self._commands.setdefault(message_type, to)
        if known != to:
            raise RoutingError(
                f"{message_type} is a command with the route {known}; it cannot also go to {printable(to)}"
            )

    def subscribe(self, message_type: str, to: str) -> None:
        subscribers = self._subscribers.setdefault(message_type, [])
        if to not in subscribers:
            subscribers.append(to)

    def handled_here(self, message_type: str) -> None:
        self._local.add(message_type)

    def for_send(self, message_type: str, to: str | None = None) -> str:
        """The one destination; raises RoutingError when there is none, or more than one."""
        if to == LOCAL and not self._is_handled_here(message_type):
            raise RoutingError(f"{message_type} has no handler here, and was sent to 'local'; declare one")
        if to is not None:
            return to
        if (command := self._commands.get(message_type)) is not None:
            return command
        if self._is_handled_here(message_type):
            return LOCAL
        subscribers = self._subscribers.get(message_type, [])
        if len(subscribers) == 1:
            return subscribers[0]
        if subscribers:
            raise RoutingError(
                f"{message_type} has {several(len(subscribers), 'subscribers')}: use publish() for an event"
            )
        routed = {*self._commands, *self._subscribers}
        if newer := next((each for each in newer_types(message_type) if each in routed), None):
            raise RoutingError(
                f"{message_type} has no destination, but {newer} has one: send the newer class, {class_name(newer)}"
            )
        raise RoutingError(
            f"{message_type} has no destination: declare bus.route({class_name(message_type)}, to=...), handle it "
            "here, or give send(..., to=...), such as to='tcp://127.0.0.1:2302'"
        )

    def for_publish(self, message_type: str) -> Sequence[str]:
        """Every subscriber; raises RoutingError for a command."""
        if message_type in self._commands:
            raise RoutingError(f"{message_type} is a command with one route: use send()")
        local = [LOCAL] if self._is_handled_here(message_type) else []
        return [*self._subscribers.get(message_type, []), *local]

    def is_event(self, message_type: str) -> bool:
        """True for a type with subscribers and without a route."""
        return message_type in self._subscribers and message_type not in self._commands

    def destinations(self) -> Mapping[str, Sequence[str]]:
        """Every declared destination by message type, for display."""
        types = sorted({*self._commands, *self._subscribers, *self._local})
        return {name: self._all(name) for name in types}

    def _is_handled_here(self, message_type: str) -> bool:
        """True for a type that is handled here, also after upcasting."""
        return message_type in self._local or any(newer in self._local for newer in newer_types(message_type))

    def _all(self, name: str) -> list[str]:
        command = [self._commands[name]] if name in self._commands else []
        return [*command, *self._subscribers.get(name, []), *([LOCAL] if name in self._local else [])]
