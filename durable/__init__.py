"""Store-and-forward messaging for Python applications that already have a Postgres database.

The names in `__all__` are public; everything else may change. Each is loaded when it is first used: a process that
needs one module of durable, such as a worker of Spark, does not load SQLAlchemy and the agents for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from durable.application.circuit_breaker import CircuitBreaker
    from durable.application.incoming import Context, Incoming
    from durable.application.injection import Depends
    from durable.application.middleware import HandleNext, Middleware, SendNext
    from durable.application.retry import Retry, RetryAfter
    from durable.bus import Bus
    from durable.encryption.keys import Keys
    from durable.envelope import Envelope
    from durable.errors import (
        DurableError,
        InvalidMessage,
        InvalidSetting,
        LeaseLost,
        NoAnswer,
        NoUnitOfWork,
        PauseListener,
        PutBack,
        Reject,
        Release,
        RetryLater,
        RoutingError,
        SchemaMismatch,
        StillWaiting,
        StorageUnavailable,
        TransactionEnded,
        TransportError,
        UndecodableMessages,
        UnknownMessage,
        UnknownMessageType,
        WiringError,
    )
    from durable.messages.codec import Codec, register_codec
    from durable.messages.codecs.json import JsonCodec
    from durable.messages.codecs.msgpack import MsgpackCodec
    from durable.messages.registry import message
    from durable.messages.upcasting import upcaster
    from durable.outbox.envelope_factory import Outgoing
    from durable.outbox.outbox import Outbox
    from durable.outbox.unit_of_work import UnitOfWork
    from durable.requests.receipts import Delivery, Receipt
    from durable.settings import Settings
    from durable.version import __version__

__all__ = [
    "Bus",
    "CircuitBreaker",
    "Codec",
    "Context",
    "Delivery",
    "Depends",
    "DurableError",
    "Envelope",
    "HandleNext",
    "Incoming",
    "InvalidMessage",
    "InvalidSetting",
    "JsonCodec",
    "Keys",
    "LeaseLost",
    "Middleware",
    "MsgpackCodec",
    "NoAnswer",
    "NoUnitOfWork",
    "Outbox",
    "Outgoing",
    "PauseListener",
    "PutBack",
    "Receipt",
    "Reject",
    "Release",
    "Retry",
    "RetryAfter",
    "RetryLater",
    "RoutingError",
    "SchemaMismatch",
    "SendNext",
    "Settings",
    "StillWaiting",
    "StorageUnavailable",
    "TransactionEnded",
    "TransportError",
    "UndecodableMessages",
    "UnitOfWork",
    "UnknownMessage",
    "UnknownMessageType",
    "WiringError",
    "__version__",
    "message",
    "register_codec",
    "upcaster",
]

_HOMES = {
    "Bus": "durable.bus",
    "CircuitBreaker": "durable.application.circuit_breaker",
    "Codec": "durable.messages.codec",
    "Context": "durable.application.incoming",
    "Delivery": "durable.requests.receipts",
    "Depends": "durable.application.injection",
    "DurableError": "durable.errors",
    "Envelope": "durable.envelope",
    "HandleNext": "durable.application.middleware",
    "Incoming": "durable.application.incoming",
    "InvalidMessage": "durable.errors",
    "InvalidSetting": "durable.errors",
    "JsonCodec": "durable.messages.codecs.json",
    "Keys": "durable.encryption.keys",
    "LeaseLost": "durable.errors",
    "Middleware": "durable.application.middleware",
    "MsgpackCodec": "durable.messages.codecs.msgpack",
    "NoAnswer": "durable.errors",
    "NoUnitOfWork": "durable.errors",
    "Outbox": "durable.outbox.outbox",
    "Outgoing": "durable.outbox.envelope_factory",
    "PauseListener": "durable.errors",
    "PutBack": "durable.errors",
    "Receipt": "durable.requests.receipts",
    "Reject": "durable.errors",
    "Release": "durable.errors",
    "Retry": "durable.application.retry",
    "RetryAfter": "durable.application.retry",
    "RetryLater": "durable.errors",
    "RoutingError": "durable.errors",
    "SchemaMismatch": "durable.errors",
    "SendNext": "durable.application.middleware",
    "Settings": "durable.settings",
    "StillWaiting": "durable.errors",
    "StorageUnavailable": "durable.errors",
    "TransactionEnded": "durable.errors",
    "TransportError": "durable.errors",
    "UndecodableMessages": "durable.errors",
    "UnitOfWork": "durable.outbox.unit_of_work",
    "UnknownMessage": "durable.errors",
    "UnknownMessageType": "durable.errors",
    "WiringError": "durable.errors",
    "__version__": "durable.version",
    "message": "durable.messages.registry",
    "register_codec": "durable.messages.codec",
    "upcaster": "durable.messages.upcasting",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return __all__
