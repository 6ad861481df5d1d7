"""What the application's handlers look like, and what each of their parameters is to be given.

    @bus.handles(OrderPlaced)
    async def reserve(order: OrderPlaced, session: AsyncSession, ctx: Context, clock: Annotated[Clock, Depends(clock)])

A parameter is known by its annotation: the message's class, AsyncSession (async handlers) or Session (sync ones),
Context, or Annotated[T, Depends(f)]. f is called for each attempt, with parameters of the same kinds; it may be async,
or a generator that cleans up after its yield. With `group=N` the message may be annotated list[OrderPlaced]: the
handler is then called once for all messages of its transaction. Everything is resolved when the handler is declared,
so a mistake stops the application at its start and not at its first message.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from types import GenericAlias
from typing import Annotated, Any, Literal, Unpack, get_args, get_origin
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.composing import REPLY_TO, SendOptions
from durable.envelope import Envelope, Leased
from durable.errors import InvalidSetting, RoutingError
from durable.ordering import share_of
from durable.retry import ByError, Retry
from durable.unit_of_work import Outbox

OnDeadLetter = Literal["continue", "park"]


@dataclass(frozen=True, slots=True)
class Depends:
    """Marks a handler's parameter as what `provider` returns: `Annotated[Mailer, Depends(mailer)]`."""

    provider: Callable[..., Any]


class Context:
    """What a handler may know and do besides its message. Read-only; valid while the handler runs."""

    def __init__(self, lease: Leased, attempt: int, outbox: Outbox) -> None:
        self._envelope = lease.envelope
        self._outbox = outbox
        self.attempt = attempt
        """Which attempt this is, from 1."""

    @property
    def id(self) -> UUID:
        return self._envelope.id

    @property
    def message_type(self) -> str:
        return self._envelope.message_type

    @property
    def source(self) -> str:
        """The service that sent the message."""
        return self._envelope.source

    @property
    def correlation_id(self) -> UUID:
        """The id of the message that began the conversation."""
        return self._envelope.correlation_id

    @property
    def causation_id(self) -> UUID | None:
        """The id of the message whose handler sent this one."""
        return self._envelope.causation_id

    @property
    def sent_at(self) -> datetime:
        return self._envelope.sent_at

    @property
    def headers(self) -> Mapping[str, str]:
        return self._envelope.headers

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a command with the handler's transaction."""
        return self._outbox.send(message, to=to, **options)

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Publish an event with the handler's transaction."""
        return self._outbox.publish(message, **options)

    def schedule(self, message: object, *, after: timedelta | float, **options: Unpack[SendOptions]) -> UUID:
        """Send a command that leaves only after this time (a timedelta or seconds)."""
        options["delay"] = after
        return self._outbox.send(message, **options)

    def reply(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Send a command to the address that the sender gave with reply_to=; raises RoutingError if it gave none."""
        address = self._envelope.headers.get(REPLY_TO)
        if address is None:
            raise RoutingError(f"message {self.id} asks for no reply: its sender gave no reply_to=")
        return self._outbox.send(message, to=address, **options)


@dataclass(frozen=True, slots=True)
class Call:
    """What one attempt has to give to a handler."""

    message: object
    session: Session | AsyncSession
    context: Context


class _Source(typing.Protocol):
    """Where the value of one parameter comes from."""

    def __call__(self, call: Call) -> Any: ...


_MESSAGE: _Source = lambda call: call.message  # noqa: E731
_SESSION: _Source = lambda call: call.session  # noqa: E731
_CONTEXT: _Source = lambda call: call.context  # noqa: E731


@dataclass(frozen=True)
class _Injected:
    """A function with the sources of its parameters; `dependencies` are functions of the same kind."""

    function: Callable[..., Any]
    direct: Mapping[str, _Source]
    dependencies: Mapping[str, _Injected]

    @cached_property
    def _opens(self) -> Callable[..., AbstractAsyncContextManager[Any]] | None:
        return asynccontextmanager(self.function) if inspect.isasyncgenfunction(self.function) else None

    @cached_property
    def _opens_sync(self) -> Callable[..., AbstractContextManager[Any]] | None:
        return contextmanager(self.function) if inspect.isgeneratorfunction(self.function) else None

    async def call(self, call: Call, stack: AsyncExitStack) -> Any:
        values = {name: source(call) for name, source in self.direct.items()}
        for name, dependency in self.dependencies.items():
            values[name] = await dependency.call(call, stack)
        if self._opens is not None:
            return await stack.enter_async_context(self._opens(**values))
        if self._opens_sync is not None:
            return stack.enter_context(self._opens_sync(**values))
        result = self.function(**values)
        return await result if inspect.isawaitable(result) else result

    def call_sync(self, call: Call, stack: ExitStack) -> Any:
        values = {name: source(call) for name, source in self.direct.items()}
        for name, dependency in self.dependencies.items():
            values[name] = dependency.call_sync(call, stack)
        if self._opens_sync is not None:
            return stack.enter_context(self._opens_sync(**values))
        return self.function(**values)


@dataclass(frozen=True)
class Handler:
    """A declared handler of one message type."""

    message_type: str
    cls: type[Any]
    function: Callable[..., Any]
    retry: Retry
    concurrency: int | None
    """How many messages run at once on each node; None: as the settings say."""
    group: int
    """How many waiting messages may share one transaction; 1: each has its own."""
    timeout: timedelta | None
    """For one attempt; None: as the settings say."""
    by_error: ByError = field(default_factory=dict)
    """What errors of these classes lead to instead of `retry`."""
    ordered: bool = False
    """One message at a time over all nodes, in their order."""
    on_dead_letter: OnDeadLetter | None = None
    """What becomes of those behind a dead letter in its order; None: as the settings say."""
    fair_by: str | None = None
    """The header, or `key`, that names the tenant of a message; None: first come, first served."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """How many messages of a tenant are handled in its turn, 1 unless said otherwise."""
    is_async: bool = field(init=False)
    takes_list: bool = field(init=False)
    """Is it called once with all messages of its transaction?"""
    _injected: _Injected = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise InvalidSetting(f"{self.name}: concurrency and group must be at least 1")
        if self.on_dead_letter not in (None, "continue", "park"):
            raise InvalidSetting(f"{self.name}: on_dead_letter={self.on_dead_letter!r}; use 'continue' or 'park'")
        if self.fair_by is not None and (self.ordered or not self.fair_by):
            raise InvalidSetting(f"{self.name}: fair_by= names a header or 'key', and an ordered handler has no turns")
        if self.weights and (self.fair_by is None or any(weight < 1 for weight in self.weights.values())):
            raise InvalidSetting(f"{self.name}: weights= are whole numbers from 1 on, for the tenants of fair_by=")
        is_async = inspect.iscoroutinefunction(self.function)
        object.__setattr__(self, "is_async", is_async)
        object.__setattr__(self, "takes_list", _takes_list(self.function, self.cls, of=self.name))
        object.__setattr__(self, "_injected", _resolve(self.function, self.cls, is_async=is_async, of=self.name))

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def share_of(self) -> Callable[[Envelope], str] | None:
        """Whose share a message is of; None without fair_by."""
        return None if self.fair_by is None else partial(share_of, header=self.fair_by)

    async def run(self, call: Call) -> Any:
        """Run an async handler and return what it returned."""
        async with AsyncExitStack() as stack:
            return await self._injected.call(call, stack)

    def run_sync(self, call: Call) -> Any:
        """Run a sync handler, in the thread that this is called in."""
        try:
            with ExitStack() as stack:
                return self._injected.call_sync(call, stack)
        except StopIteration as error:  # no Future can carry it; coroutines do the same (PEP 479)
            raise RuntimeError("the handler raised StopIteration") from error


def _resolve(function: Callable[..., Any], cls: type[Any], *, is_async: bool, of: str) -> _Injected:
    direct: dict[str, _Source] = {}
    dependencies: dict[str, _Injected] = {}
    hints = _hints(function, of)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        provider = next((extra.provider for extra in _extras(hint) if isinstance(extra, Depends)), None)
        if provider is not None:
            if not is_async and (inspect.iscoroutinefunction(provider) or inspect.isasyncgenfunction(provider)):
                raise InvalidSetting(f"handler {of}: a sync handler cannot depend on the async {provider.__qualname__}")
            dependencies[name] = _resolve(provider, cls, is_async=is_async, of=of)
        elif hint is cls or hint == GenericAlias(list, (cls,)):
            direct[name] = _MESSAGE
        elif hint is Context:
            direct[name] = _CONTEXT
        elif hint is (AsyncSession if is_async else Session):
            direct[name] = _SESSION
        elif hint in (AsyncSession, Session):
            right = "AsyncSession" if is_async else "Session"
            raise InvalidSetting(f"handler {of}: {name} must be annotated {right} in this kind of handler")
        elif parameter.default is inspect.Parameter.empty:
            raise InvalidSetting(
                f"handler {of}: what is parameter {name!r}? Annotate it with {cls.__name__}, AsyncSession, Session, "
                "Context or Annotated[T, Depends(provider)]"
            )
    return _Injected(function, direct, dependencies)


def _takes_list(function: Callable[..., Any], cls: type[Any], *, of: str) -> bool:
    hints = [hint for name, hint in _hints(function, of).items() if name != "return"]
    takes_list = GenericAlias(list, (cls,)) in hints
    if takes_list and Context in hints:
        raise InvalidSetting(f"handler {of}: there is no one Context for a list of messages; take them singly")
    return takes_list


def _hints(function: Callable[..., Any], of: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidSetting(f"handler {of}: an annotation cannot be resolved: {error}") from error


def _extras(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()
