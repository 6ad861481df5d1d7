"""Store-and-forward messaging for Python applications that already have a Postgres database.

What is named in `__all__` is public; everything else may change.
"""

from durable.breaker import CircuitBreaker
from durable.bus import Bus
from durable.codec import Codec, register_codec
from durable.codecs.json import JsonCodec
from durable.codecs.msgpack import MsgpackCodec
from durable.composing import Outgoing
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
from durable.handlers import Context, Depends, Incoming
from durable.messages import message
from durable.middleware import HandleNext, Middleware, SendNext
from durable.outbox import Outbox
from durable.retry import Retry, RetryAfter
from durable.settings import Settings
from durable.unit_of_work import UnitOfWork
from durable.upcasting import upcaster
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
