"""Survey: the description of an application, from its declarations.

Messages that are sent by `send(..., to=...)` alone are declared nowhere, and are in no description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from durable.application.application import Application
from durable.calls.contract import Contract, Method
from durable.description.document import (
    DescribedListener,
    DescribedMessage,
    DescribedMethod,
    DescribedQueue,
    DescribedService,
    Description,
    Role,
)
from durable.errors import InvalidSetting, UnknownMessageType, text_of
from durable.messages.registry import class_of, content_type_of, is_encrypted, name_of
from durable.messages.routing import LOCAL
from durable.messages.schemas import Json, schema_of
from durable.messages.upcasting import sent_class
from durable.redaction import shown
from durable.transports.rabbitmq.topology import Topology
from durable.version import __version__

_VERSION: Final = re.compile(r"(.+)\.v(\d+)")
_CALLED_AT: Final = ("tcp://", "unix://", "http://", "https://")


def describe(application: Application, topologies: Mapping[str, Topology]) -> Description:
    """Describe an application; `topologies` are its queues by broker. Raises InvalidSetting."""
    return Description(
        application=application.service,
        durable=__version__,
        listeners=[DescribedListener(address=shown(uri), name=name) for uri, name in sorted(application.listeners)],
        services=sorted(_services(application), key=lambda each: (each.role, each.name, each.version)),
        messages=[_message(application, name) for name in sorted(_types(application))],
        queues=[each for broker in sorted(topologies) for each in _queues(broker, topologies[broker])],
    )


def _services(application: Application) -> Iterator[DescribedService]:
    listening = [listener.uri for listener in application.listeners if listener.uri.startswith(_CALLED_AT)]
    for contract in application.offers.contracts:
        yield _service(contract, "offers", listening)
    called: dict[Contract, list[str]] = {}
    for contract, at in application.called:
        called.setdefault(contract, []).extend([] if at is None else [at])
    for contract, addresses in called.items():
        yield _service(contract, "calls", addresses)


def _service(contract: Contract, role: Role, addresses: list[str]) -> DescribedService:
    _ = contract.offer
    methods = [_method(each, role) for _, each in sorted(contract.methods.items())]
    return DescribedService(
        name=contract.name,
        version=contract.version,
        role=role,
        addresses=sorted(map(shown, addresses)),
        methods=methods,
    )


def _method(method: Method, role: Role) -> DescribedMethod:
    signature = method.described
    return DescribedMethod(
        name=method.name,
        signature=signature.text,
        digest=signature.digest.hex(),
        arguments=_schema(method.arguments.kind, method.full_name, written=role == "calls"),
        result=_schema(method.result.kind, method.full_name, written=role == "offers"),
    )


def _types(application: Application) -> set[str]:
    """Message types that are handled here, or sent from here to others."""
    routed = {name for name, uris in application.routes.destinations().items() if set(uris) != {LOCAL}}
    return {*application.by_type(), *routed, *_returned(application)}


def _returned(application: Application) -> set[str]:
    """Return the types that handlers return, and that go to others."""
    found: set[str] = set()
    for handler in application.handlers.values():
        for cls in handler.returns:
            try:
                found.add(name_of(cls))
            except UnknownMessageType:  # a base class of messages
                continue
    return {name for name in found if name not in application.by_type()}


def _message(application: Application, message_type: str) -> DescribedMessage:
    handler = application.by_type().get(message_type)
    destinations = [uri for uri in application.routes.destinations().get(message_type, ()) if uri != LOCAL]
    is_sent = bool(destinations) or handler is None
    cls = sent_class(message_type, handler.cls) if handler is not None else class_of(message_type)
    base, version = found.groups() if (found := _VERSION.fullmatch(message_type)) else (message_type, "1")
    return DescribedMessage(
        type=message_type,
        name=base,
        version=int(version),
        content_type=content_type_of(cls),
        encrypted=is_encrypted(message_type),
        handler=handler.name if handler is not None else None,
        destinations=sorted(map(shown, destinations)),
        is_event=application.routes.is_event(message_type),
        received=_schema(cls, message_type, written=False) if handler is not None else None,
        sent=_schema(cls, message_type, written=True) if is_sent else None,
    )


def _schema(kind: Any, of: str, *, written: bool) -> Json:
    try:
        return schema_of(kind, written=written)
    except Exception as error:  # the class's own hooks are called, and may raise anything
        raise InvalidSetting(f"{of}: cannot be described: {text_of(error)}") from error


def _queues(broker: str, topology: Topology) -> Iterator[DescribedQueue]:
    for queue in topology.queues:
        keys = [f"{each.exchange} {each.routing_key}" for each in topology.bindings if each.queue == queue.name]
        yield DescribedQueue(
            broker=broker, name=queue.name, declared=queue.declared, arguments=queue.arguments, bindings=keys
        )
