"""Errors, by what the caller can do about them.

    DurableError
    ├── WiringError                fix the code or the configuration; durable-agent exits with 2
    │   ├── InvalidSetting         a setting has a value that it must not have
    │   ├── NoUnitOfWork           send() was called where no transaction is in scope
    │   ├── RoutingError           no destination, or too many for a command
    │   ├── UnknownMessageType     a class or a name that no @message has registered
    │   ├── SchemaMismatch         the database is older or newer than this code
    │   └── UndecodableMessages    messages wait that this code cannot decode
    ├── InvalidMessage             this message can never be stored or decoded: dead-letter it
    │   └── Forged                 an encrypted body does not belong to its envelope, or was changed
    ├── MissingKey                 a message is encrypted with a key that is not here: try again when it is
    ├── BrokeOff                   a task was ended by an exception that is no Exception: its cause
    ├── TransportError             try again later
    │   ├── ConnectionFailed       the peer could not be reached, or went away
    │   ├── PeerTimeout            the peer did not answer in time
    │   └── ProtocolViolation      the peer said something that the protocol forbids
    ├── CallFailed                 a call of another service has no result
    │   ├── NoProvider             nobody offers the service there; the call was not sent
    │   ├── IncompatibleService    the provider has another version of the service; the call was not run
    │   ├── InvalidCall            the arguments, or the result, do not fit the contract
    │   ├── RemoteError            the method raised an error at the provider
    │   ├── CallTimeout            no result in time; the call may have been run
    │   ├── CallExpired            the call waited for its turn for too long, and was not run
    │   ├── Overloaded             too many calls wait already, and this one was not run
    │   ├── ProviderSuperseded     the provider does not hold the singleton now; the call was not run
    │   └── ProviderGone           the provider ended before its answer; the call may have been run
    ├── StorageUnavailable         the database cannot be used now: try again later
    ├── UnknownMessage             no message of this id is known here
    ├── StillWaiting               a message was not at its end in time: wait again
    ├── ArchiveConflict            two were at work on the same rows of a lake at once: one of them did it
    ├── LeaseLost                  another node owns the work now: roll back and forget it
    ├── TransactionEnded           a handler has ended the transaction that its message is finished in
    └── Verdict                    raised by a handler to decide what becomes of its message
        ├── Reject                 dead-letter it now
        ├── RetryLater             run it again after a delay that the handler chooses
        ├── Release                hand it back uncounted, for any node to take
        ├── PutBack                put it at the end of its queue, with other headers if need be
        └── PauseListener          hand it back, and take no more of them for a while

Without a message, an error uses the first line of its docstring. No message shows a secret.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from types import FrameType
from typing import Any, Final, TypeVar

from durable.duration import Duration, time_from_now
from durable.redaction import printable, redacted

__all__ = [
    "ArchiveConflict",
    "BrokeOff",
    "CallExpired",
    "CallFailed",
    "CallTimeout",
    "ConnectionFailed",
    "DurableError",
    "Forged",
    "IncompatibleService",
    "InvalidCall",
    "InvalidMessage",
    "InvalidSetting",
    "LeaseLost",
    "MissingKey",
    "NoAnswer",
    "NoProvider",
    "NoUnitOfWork",
    "Overloaded",
    "PauseListener",
    "PeerTimeout",
    "ProtocolViolation",
    "ProviderGone",
    "ProviderSuperseded",
    "PutBack",
    "Reject",
    "Release",
    "RemoteError",
    "RetryLater",
    "RoutingError",
    "SchemaMismatch",
    "StillWaiting",
    "StorageUnavailable",
    "TransactionEnded",
    "TransportError",
    "UndecodableMessages",
    "UnknownMessage",
    "UnknownMessageType",
    "Verdict",
    "WiringError",
]

_NO_TEXT: Final = ", whose text cannot be made"

_NOT_OF_THE_APPLICATION: Final = (
    "<",  # frozen modules, and the code of dataclasses
    *(os.path.join(os.path.dirname(__file__), ""), os.path.join(sysconfig.get_path("stdlib"), "")),
)
_INSTALLED: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

E = TypeVar("E", bound=BaseException)


class DurableError(Exception):
    """The root of every error that durable raises."""

    def __init__(self, message: str | None = None) -> None:
        summary = (type(self).__doc__ or "").partition("\n\n")[0]
        super().__init__(_shown(message) or " ".join(summary.split()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


class WiringError(DurableError):
    """The wiring of the application is wrong."""


class InvalidSetting(WiringError):
    """A setting has a value that it must not have."""


class NoUnitOfWork(WiringError):
    """send() needs a transaction: use `async with bus.unit_of_work()` or `with bus.enlist(session)` around it."""


class RoutingError(WiringError):
    """The message has no destination, or more than a command may have."""


class UnknownMessageType(WiringError):
    """No class is registered under this name: decorate it with @message(name)."""


class SchemaMismatch(WiringError):
    """The database is at another schema version than this code."""


class UndecodableMessages(WiringError):
    """Messages wait for handlers whose code cannot decode them; a line for each type says which."""


class InvalidMessage(DurableError):
    """The message cannot be stored or decoded, now or later."""


class Forged(InvalidMessage):
    """An encrypted body does not belong to its envelope, or was changed."""


class BrokeOff(DurableError):
    """A task was ended by an exception that is no Exception, or cancelled by accident."""


class MissingKey(DurableError):
    """A message is encrypted with a key that is not here. `key_id` names it."""

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"no encryption key {key_id!r} here: give it by encryption_keys, encryption_key_file or Bus.keys_from()"
        )
        self.key_id = key_id


class TransportError(DurableError):
    """The batch could not be delivered; whether it arrived is unknown."""


class ConnectionFailed(TransportError):
    """The peer could not be reached, or closed the connection."""


class PeerTimeout(TransportError):
    """The peer did not answer in time."""


class ProtocolViolation(TransportError):
    """The peer has broken the protocol."""


class CallFailed(DurableError):
    """A call of another service has no result."""


class NoProvider(CallFailed):
    """No provider of the service is there, or it may not be called. The call was not sent."""


class IncompatibleService(CallFailed):
    """The provider has another version of the service. The call was not run."""


class InvalidCall(CallFailed):
    """The arguments of a call, or its result, do not fit the contract."""


class RemoteError(CallFailed):
    """A method raised an error at its provider.

    `error`: name of the error's class. `reason`: its text. `provider`: address of the provider.
    """

    def __init__(self, error: str, reason: str, provider: str) -> None:
        super().__init__(f"{error} at {provider}: {reason}")
        self.error, self.reason, self.provider = error, reason, provider


class CallTimeout(CallFailed, TimeoutError):
    """A call had no result in time. It was cancelled, and may have been run."""


class CallExpired(CallFailed):
    """A call waited for its turn at the provider for too long. It was not run."""


class Overloaded(CallFailed):
    """Too many calls wait at the provider already. This one was not run."""


class ProviderSuperseded(CallFailed):
    """The provider does not hold the singleton now, or is not sure that it does. The call was not run."""


class ProviderGone(CallFailed):
    """The provider ended, or its connection, before it answered. The call may have been run."""


class StorageUnavailable(DurableError):
    """The database cannot be used now; whether the last commit took place is unknown."""


class UnknownMessage(DurableError):
    """No message of this id is known here."""


class NoAnswer(DurableError):
    """The request was not handled, or its answer was forgotten: see the reason.

    `may_come`: True for a dead letter, which an operator may replay.
    """

    def __init__(self, reason: str, *, may_come: bool = False) -> None:
        super().__init__(reason)
        self.may_come = may_come


class StillWaiting(DurableError, TimeoutError):
    """A message was not at its end within the time that a caller waited for it."""


class ArchiveConflict(DurableError):
    """Another archiver, erasure or replay is at work, or has changed these rows of the lake meanwhile; none is in it
    twice. Run the command again.
    """


class LeaseLost(DurableError):
    """The work belongs to another node now; this node must not finish it."""


class TransactionEnded(DurableError):
    """The handler ended its transaction by a rollback; put statements that may fail into session.begin_nested()."""


class Verdict(DurableError):
    """A handler's decision about its message; its transaction is rolled back."""


class Reject(Verdict):
    """The handler refuses the message for good."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)


class RetryLater(Verdict):
    """The handler asks for another attempt after a delay."""

    def __init__(self, after: Duration, reason: str | None = None) -> None:
        super().__init__(reason)
        self.after = _time("RetryLater: after", after)


class Release(Verdict):
    """The handler hands the message back; the attempt is not counted."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)


class PutBack(Verdict):
    """The handler puts the message at the end of its queue; the attempt is counted.

    `headers` are set besides those that the message has; a header that is None is removed. A message with a key, or of
    an ordered handler, comes behind the others of its order then.
    """

    def __init__(self, reason: str | None = None, *, headers: Mapping[str, str | None] | None = None) -> None:
        super().__init__(reason)
        self.headers = dict(headers or {})


class PauseListener(Verdict):
    """The handler hands the message back, and pauses its listener.

    For this time no node runs the handler, and the listener that the message came by receives no messages.
    """

    def __init__(self, for_: Duration, reason: str | None = None) -> None:
        super().__init__(reason)
        self.for_ = _time("PauseListener: for_", for_)


def _time(of: str, value: Duration) -> timedelta:
    try:
        return time_from_now(value)
    except ValueError as error:
        raise InvalidSetting(f"{of}: {error}") from None


def _shown(message: str | None) -> str | None:
    """Return the message without secrets, and without what a terminal would obey; it may have several lines."""
    if not isinstance(message, str):
        return message
    return "\n".join(printable(line, len(line)) for line in redacted(message).split("\n"))


def leaves_of(error: BaseException) -> Sequence[BaseException]:
    """Return the errors that a group (of asyncio.TaskGroup or anyio) holds, in order; of any other error, itself.

    One that broke off stands for its cause.
    """
    leaves, left = [], [error]
    while left:
        each = left.pop()
        if isinstance(each, BaseExceptionGroup):
            left.extend(reversed(each.exceptions))
        elif isinstance(each, BrokeOff) and each.__cause__ is not None:
            left.append(each.__cause__)
        else:
            leaves.append(each)
    return leaves


def told_by(error: BaseException) -> BaseException:
    """Return the error that decides what follows: of a group the one that is durable's own signal, or the only one."""
    if isinstance(error, BrokeOff) and error.__cause__ is not None:
        return told_by(error.__cause__)
    leaves = leaves_of(error)
    signal = next((leaf for leaf in leaves if isinstance(leaf, Verdict | InvalidMessage | WiringError)), None)
    if signal is not None:
        return signal
    return leaves[0] if len(leaves) == 1 else error


def said(error: BaseException) -> str:
    """The type of an error and the first line of its text; also of a class of the application that cannot make it.

    Errors of the database have their statement and its values in the lines that follow, which are no business of a log.
    """
    kind = type(error).__name__
    try:
        return f"{kind}: {_text(error)}".partition("\n")[0]
    except BaseException:
        return f"{kind}{_NO_TEXT}"


def place_of(error: BaseException) -> str | None:
    """The last line of the application's own code that this error passed, such as `orders.py:16`; None without one.

    Code of durable, of installed packages and of Python itself is not the application's.
    """
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        found = _in_application(frame.f_code.co_filename, line) or found
    return found


def place_in(frame: FrameType | None) -> str | None:
    """The innermost line of the application's own code in a stack, as place_of() tells it; None without one."""
    while frame is not None:
        if found := _in_application(frame.f_code.co_filename, frame.f_lineno):
            return found
        frame = frame.f_back
    return None


def _in_application(file: str, line: int | None) -> str | None:
    if file.startswith(_NOT_OF_THE_APPLICATION) or _INSTALLED.search(file):
        return None
    return f"{_from_here(file)}:{line}"


def _from_here(file: str) -> str:
    try:
        return file.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the folder was removed
        return file


@contextmanager
def needs(what: str, *, extra: str) -> Iterator[None]:
    """Raise InvalidSetting, which says what to install, when an import in this block fails."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "a library").partition(".")[0]
        raise InvalidSetting(f"{what} needs {library}; run: pip install 'durable-bus[{extra}]'") from error


def again(error: E) -> E:
    """Return another error like this one of durable's: each of those that are told has its own, with its traceback."""
    if not isinstance(error, DurableError):
        return error
    other = copy(error)
    other.__cause__ = error.__cause__
    return other


def _restored(cls: type[DurableError], args: tuple[Any, ...], attributes: dict[str, Any]) -> DurableError:
    """Make an error anew, as pickle and copy do: each class is made of other arguments."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


def text_of(error: BaseException) -> str:
    """All that an error says, or its type when it says nothing; also of a class of the application, which may raise
    anything instead: it must not keep its message from being settled, nor end the process."""
    kind = type(error).__qualname__
    try:
        return _text(error) or kind
    except BaseException:
        return f"{kind}{_NO_TEXT}"


def _text(error: BaseException) -> str:
    """Return the text of an error; that of a group names what it holds."""
    if not isinstance(error, BaseExceptionGroup):
        return str(error)
    return f"{error}: {'; '.join(map(said, leaves_of(error)))}"
