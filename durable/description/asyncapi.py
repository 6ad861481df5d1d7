"""AsyncAPI 3.0 document of a description: https://www.asyncapi.com/docs/reference/specification/v3.0.0

servers      hosts and sockets of listeners, destinations and brokers, without users and passwords
channels     an address at which messages are received, or to which they are sent; a queue; a service that is called
operations   receive and send; a call is one with a reply
messages     each message type, with a schema of its class; arguments and results of each method
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from durable.description.document import DescribedMessage, DescribedQueue, DescribedService, Description
from durable.messages.schemas import Json, placed
from durable.transports.rabbitmq.address import SCHEME as AMQP
from durable.transports.rabbitmq.address import ExchangeAddress, QueueAddress, name_on_topic, parse_destination

_SCHEMAS: Final = "#/components/schemas/"
_MESSAGES: Final = "#/components/messages/"
_BINDING: Final = "0.3.0"
_MSGPACK: Final = "application/msgpack"


def asyncapi(description: Description, brokers: Mapping[str, str]) -> Json:
    """Return the document. `brokers` are the URLs of brokers by their names, without users and passwords."""
    return _Document(description, brokers).build()


class _Document:
    def __init__(self, description: Description, brokers: Mapping[str, str]) -> None:
        self._of = description
        self._brokers = brokers
        self._servers: dict[str, Json] = {}
        self._channels: dict[str, Json] = {}
        self._operations: dict[str, Json] = {}
        self._messages: dict[str, Json] = {}
        self._schemas: dict[str, Json] = {}
        self._keys: dict[str, str] = {}

    def build(self) -> Json:
        self._receive()
        self._send()
        for service in self._of.services:
            self._call(service)
        return {
            "asyncapi": "3.0.0",
            "info": {
                "title": self._of.application,
                "version": self._of.durable,
                "description": f"Messages and calls of {self._of.application}",
            },
            "defaultContentType": "application/json",
            "servers": self._servers,
            "channels": self._channels,
            "operations": self._operations,
            "components": {"messages": self._messages, "schemas": self._schemas},
        }

    def _receive(self) -> None:
        handled = [each for each in self._of.messages if each.received is not None]
        for listener in self._of.listeners:
            if not listener.address.startswith(f"{AMQP}://"):
                server = self._server(listener.address)
                self._channel("receive", listener.address, listener.address, [server], handled)
        for queue in self._of.queues:
            if queue.declared:
                own = [each for each in handled if queue.name == name_on_topic(self._of.application, each.type)]
                name = f"{queue.broker}-queue-{queue.name}"
                server = self._server(f"{AMQP}://{queue.broker}")
                bindings = _queue(queue.name)
                self._channel("receive", name, queue.name, [server], own or handled, bindings, **_declared(queue))

    def _send(self) -> None:
        for uri in sorted({uri for each in self._of.messages for uri in each.destinations}):
            sent = [each for each in self._of.messages if uri in each.destinations]
            address, bindings = _target(uri)
            self._channel("send", uri, address, [self._server(uri)], sent, bindings)
        answers = [each for each in self._of.messages if each.sent is not None and not each.destinations]
        if answers:  # what handlers return goes to the address that its request names
            self._channel("send", "answers", None, [], answers)

    def _channel(
        self,
        action: str,
        name: str,
        address: str | None,
        servers: list[str],
        messages: Iterable[DescribedMessage],
        bindings: Json | None = None,
        **more: Any,
    ) -> None:
        key = self._key(f"{action} {name}")
        names = {each.type: self._message(each, action) for each in messages}
        self._channels[key] = {
            "address": address,
            **_servers(servers),
            "messages": {self._key(each): {"$ref": _MESSAGES + name} for each, name in names.items()},
            **({"bindings": {"amqp": bindings}} if bindings else {}),
            **more,
        }
        if names:
            self._operations[key] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{key}"},
                "messages": [{"$ref": f"#/channels/{key}/messages/{self._key(each)}"} for each in names],
            }

    def _message(self, message: DescribedMessage, action: str) -> str:
        schema = message.received if action == "receive" else message.sent
        assert schema is not None
        is_both = message.received is not None and message.sent is not None
        name = self._key(f"{message.type}.sent" if is_both and action == "send" else message.type)
        title = f"{message.name}, version {message.version}"
        self._messages[name] = self._encoded(message.type, title, message.content_type, name, schema)
        if message.encrypted:
            self._messages[name]["description"] = "The body is encrypted"
        return name

    def _encoded(self, of: str, title: str, content_type: str, name: str, schema: Json) -> Json:
        self._schemas[name] = placed(schema, name, _SCHEMAS, self._schemas)
        return {"name": of, "title": title, "contentType": content_type, "payload": {"$ref": _SCHEMAS + name}}

    def _call(self, service: DescribedService) -> None:
        action = "receive" if service.role == "offers" else "send"
        key = self._key(f"{service.role} {service.name} {service.version}")
        names: dict[str, str] = {}
        for method in service.methods:
            for part, schema in (("arguments", method.arguments), ("result", method.result)):
                of = f"{service.name}.{method.name}.{part}"
                names[f"{method.name}.{part}"] = name = self._key(f"{service.role}.{of}")
                title = f"{part} of {service.name} {service.version} {method.name}"
                self._messages[name] = self._encoded(of, title, _MSGPACK, name, schema)
        self._channels[key] = {
            "address": f"{service.name} {service.version}",
            "title": f"Service {service.name}, version {service.version}",
            **_servers([self._server(uri) for uri in service.addresses]),
            "messages": {self._key(each): {"$ref": _MESSAGES + name} for each, name in names.items()},
        }
        channel = {"$ref": f"#/channels/{key}"}
        for method in service.methods:
            within = f"#/channels/{key}/messages"
            self._operations[self._key(f"{key}.{method.name}")] = {
                "action": action,
                "channel": channel,
                "title": method.signature,
                "messages": [{"$ref": f"{within}/{self._key(f'{method.name}.arguments')}"}],
                "reply": {"channel": channel, "messages": [{"$ref": f"{within}/{self._key(f'{method.name}.result')}"}]},
            }

    def _server(self, uri: str) -> str:
        """Return the name of the server of an address."""
        parts = urlsplit(uri)
        if parts.scheme == AMQP:
            name = self._key(f"{AMQP}-{parts.netloc}")
            broker = urlsplit(self._brokers.get(parts.netloc, f"amqp://{parts.netloc}"))
            path = {"pathname": broker.path} if broker.path.strip("/") else {}
            self._servers[name] = {"host": broker.netloc, "protocol": broker.scheme, **path}
            return name
        name = self._key(f"{parts.scheme}-{parts.netloc or parts.path.strip('/')}")
        host = {"host": parts.netloc or "localhost", "protocol": parts.scheme}
        path = {"pathname": parts.path} if parts.path.strip("/") else {}
        self._servers[name] = {**host, **path}
        return name

    def _key(self, name: str) -> str:
        """Return the key of a name, which has letters, digits, - and _; no two names have the same."""
        if name not in self._keys:
            taken, key, count = set(self._keys.values()), re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_"), 1
            while (free := key if count == 1 else f"{key}_{count}") in taken:
                count += 1
            self._keys[name] = free
        return self._keys[name]


def _servers(names: list[str]) -> Json:
    return {"servers": [{"$ref": f"#/servers/{name}"} for name in dict.fromkeys(names)]} if names else {}


def _queue(name: str) -> Json:
    queue = {"name": name, "durable": True, "exclusive": False, "autoDelete": False}
    return {"is": "queue", "queue": queue, "bindingVersion": _BINDING}


def _declared(queue: DescribedQueue) -> Json:
    """Return the arguments and bindings of a queue, for which AsyncAPI has no fields."""
    said = {"x-queue-arguments": queue.arguments, "x-queue-bindings": queue.bindings}
    return {name: each for name, each in said.items() if each}


def _target(uri: str) -> tuple[str, Json | None]:
    """Return the address of a destination, and its bindings of AMQP."""
    if not uri.startswith(f"{AMQP}://"):
        return uri, None
    match parse_destination(uri):
        case QueueAddress(queue=name):
            return name, _queue(name)
        case ExchangeAddress(exchange=name, routing_key=routing_key):
            exchange = {"name": name, "type": "topic", "durable": True, "autoDelete": False}
            return routing_key, {"is": "routingKey", "exchange": exchange, "bindingVersion": _BINDING}
