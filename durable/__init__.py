"""Store-and-forward messaging for Python applications that already have a Postgres database.

What is named in `__all__` is public; everything else may change.
"""

from durable.breaker import CircuitBreaker
from durable.bus import Bus
from durable.composing import Outgoing
from durable.errors import (
    DurableError,
    InvalidMessage,
    InvalidSetting,
    LeaseLost,
    NoUnitOfWork,
    PauseListener,
    Reject,
    Release,
    RetryLater,
    RoutingError,
    SchemaMismatch,
    StorageUnavailable,
    TransportError,
    UnknownMessageType,
    WiringError,
)
from durable.handlers import Context, Depends, Incoming
from durable.messages import message
from durable.middleware import HandleNext, Middleware, SendNext
from durable.retry import Retry, RetryAfter
from durable.settings import Settings
from durable.unit_of_work import Outbox, UnitOfWork
from durable.version import __version__

__all__ = [
    "Bus",
    "CircuitBreaker",
    "Context",
    "Depends",
    "DurableError",
    "HandleNext",
    "Incoming",
    "InvalidMessage",
    "InvalidSetting",
    "LeaseLost",
    "Middleware",
    "NoUnitOfWork",
    "Outbox",
    "Outgoing",
    "PauseListener",
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
    "TransportError",
    "UnitOfWork",
    "UnknownMessageType",
    "WiringError",
    "__version__",
    "message",
]
