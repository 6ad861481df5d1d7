"""Store-and-forward messaging for Python applications that already have a Postgres database.

What is named in `__all__` is public; everything else may change.
"""

from durable.application.circuit_breaker import CircuitBreaker
from durable.application.handlers import Context, Depends, Incoming
from durable.application.middleware import HandleNext, Middleware, SendNext
from durable.application.retry import Retry, RetryAfter
from durable.bus import Bus
from durable.envelope import Envelope
from durable.errors import (
    DurableError,
    InvalidMessage,
    InvalidSetting,
    LeaseLost,
    NoUnitOfWork,
    PauseListener,
    PutBack,
    Reject,
    Release,
    RetryLater,
    RoutingError,
    SchemaMismatch,
    StorageUnavailable,
    TransactionEnded,
    TransportError,
    UndecodableMessages,
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
from durable.settings import Settings
from durable.version import __version__

__all__ = [
    "Bus",
    "CircuitBreaker",
    "Codec",
    "Context",
    "Depends",
    "DurableError",
    "Envelope",
    "HandleNext",
    "Incoming",
    "InvalidMessage",
    "InvalidSetting",
    "JsonCodec",
    "LeaseLost",
    "Middleware",
    "MsgpackCodec",
    "NoUnitOfWork",
    "Outbox",
    "Outgoing",
    "PauseListener",
    "PutBack",
    "Reject",
    "Release",
    "Retry",
    "RetryAfter",
    "RetryLater",
    "RoutingError",
    "SchemaMismatch",
    "SendNext",
    "Settings",
    "StorageUnavailable",
    "TransactionEnded",
    "TransportError",
    "UndecodableMessages",
    "UnitOfWork",
    "UnknownMessageType",
    "WiringError",
    "__version__",
    "message",
    "register_codec",
    "upcaster",
]
