"""Handlers of the application, and the value of each of their parameters.

    @bus.handles(OrderPlaced)
    async def reserve(order: OrderPlaced, session: AsyncSession, ctx: Context, clock: Annotated[Clock, Depends(clock)])

A parameter is known by its annotation: the message's class, AsyncSession (async handlers) or Session (sync ones),
Context, or Annotated[T, Depends(f)]. f is called for each attempt, with parameters of the same kinds; it may be async,
or a generator that cleans up after its yield. With `max_batch=N` the message may be annotated list[OrderPlaced]: the
handler is then called once for all messages of its transaction. Everything is resolved when the handler is declared,
so a mistake stops the application at its start and not at its first message.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from functools import cached_property, partial
from types import GenericAlias, MappingProxyType
from typing import Any, Literal, Self, Unpack
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.application import signatures
from durable.application.circuit_breaker import CircuitBreaker
from durable.application.context import CircuitControl, PauseRequest
from durable.application.retry import ByError, Retry
from durable.arguments import Argument, annotations_of, checked_class, refuse_misfits, refuse_unknown
from durable.envelope import Envelope, LeasedEnvelope
from durable.errors import InvalidSetting, RoutingError, Verdict
from durable.messages.ordering import share_of
from durable.messages.routing import LOCAL
from durable.outbox.envelope_factory import REPLY_TO, Cause, SendOptions
from durable.outbox.outbox import Outbox

OnDeadLetter = Literal["continue", "park"]
OnExpiry = Literal["forget", "dead-letter"]

_SHOWN_AS = {"by_error": "on_error"}
"""Parameters of Bus.handles() that have another name here."""


@checked_class
@dataclass(frozen=True, slots=True)
class Depends:
    """Marker for a handler's parameter that `provider` makes: `Annotated[Mailer, Depends(mailer)]`."""

    provider: Callable[..., Any]


class Context:
    """Context of a message while its handler runs. Read-only."""

    __slots__ = ("_asked", "_attempt", "_envelope", "_is_own", "_outbox")

    def __init__(
        self, lease: LeasedEnvelope, attempt: int, outbox: Outbox, asked: list[PauseRequest] | None = None
    ) -> None:
        self._envelope = lease.envelope
        self._is_own = lease.endpoint == LOCAL
        self._outbox = outbox
        self._attempt = attempt
        self._asked = [] if asked is None else asked

    @property
    def circuit(self) -> CircuitControl:
        """Stops this handler, or a destination, on every node: `ctx.circuit.open(for_=60, reason="quota used up")`."""
        return CircuitControl(self._envelope.message_type, self._asked, self._outbox.destinations_of)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt

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
    def deliver_by(self) -> datetime | None:
        """Time at which the message expires unless handled; pass it to send() for messages that are useless later."""
        return self._envelope.deliver_by

    @property
    def headers(self) -> Mapping[str, str]:
        return MappingProxyType(self._envelope.headers)

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a command with the handler's transaction."""
        return self._outbox.send(message, to=to, **options)

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Publish an event with the handler's transaction."""
        return self._outbox.publish(message, **options)

    def reply(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Send a command to the address that the sender gave with reply_to=.

        Raises RoutingError if it gave none, and InvalidMessage if another service gave one that is neither a declared
        destination nor allowed by the setting answer_to: the message becomes a dead letter then.
        """
        refuse_unknown("reply", options, annotations_of(SendOptions), "option")
        address = self._envelope.headers.get(REPLY_TO)
        if address is None:
            raise RoutingError(f"message {self.id} asks for no reply: the sender gave no reply_to=")
        if self._is_own:
            return self._outbox.send(message, to=address, **options)
        return self._outbox.answer(message, to=address, **options)

    def cascade(self, result: object) -> None:
        """Send the messages that a handler returned: one, several in a list or tuple, or None."""
        self._outbox.cascade(result)


class Incoming(msgspec.Struct, frozen=True, eq=False):
    """Call of a handler: its messages and context. Immutable; `replace` makes another one."""

    message: object
    """The message; a list of them for a handler that takes a list."""
    session: Session | AsyncSession
    """The transaction that the message is finished in. A sync handler's Session does its I/O in threads only."""
    contexts: Sequence[Context]
    """The context of each message: one, except for a handler that takes a list."""
    handler: str = ""
    """The dotted name of the handler."""

    @property
    def messages(self) -> Sequence[object]:
        """The message in a list of its own, or the list of them."""
        return self.message if isinstance(self.message, list) else (self.message,)

    @property
    def context(self) -> Context:
        """Context of the message, or of the first of the list."""
        return self.contexts[0]

    @property
    def attempt(self) -> int:
        return self.contexts[0].attempt

    def replace(self, **changes: Any) -> Self:
        """The same with other fields: `incoming.replace(message=other)`."""
        return msgspec.structs.replace(self, **changes)


class _Source(typing.Protocol):
    """Source of the value of a parameter."""

    def __call__(self, call: Incoming) -> Any: ...


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

    def takes(self, source: _Source) -> bool:
        """True when the function, or one that it depends on, is given this."""
        return source in self.direct.values() or any(each.takes(source) for each in self.dependencies.values())

    async def call(self, call: Incoming, stack: AsyncExitStack) -> Any:
        values = {name: source(call) for name, source in self.direct.items()}
        for name, dependency in self.dependencies.items():
            values[name] = await dependency.call(call, stack)
        if self._opens is not None:
            return await stack.enter_async_context(self._opens(**values))
        if self._opens_sync is not None:
            return stack.enter_context(self._opens_sync(**values))
        result = self.function(**values)
        return await result if inspect.isawaitable(result) else result

    def call_sync(self, call: Incoming, stack: ExitStack) -> Any:
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
    retry: Retry | None
    """None: as the settings say."""
    concurrency: int | None
    """The number of messages that run at once on each node; None: as the settings say."""
    max_batch: int
    """The number of waiting messages that may share one transaction; 1: each has its own."""
    timeout: timedelta | None
    """The bound of one attempt; None: as the settings say."""
    by_error: ByError = field(default_factory=dict)
    """Retry policies by class of error, used instead of `retry`."""
    circuit_breaker: CircuitBreaker | None = None
    """The rule by which failures stop the handler; None: they never do."""
    inherit_deliver_by: bool = False
    """True if messages sent by the handler expire with its message, unless they have a deadline of their own."""
    ordered: bool = False
    """One message at a time over all nodes, in their order."""
    on_dead_letter: OnDeadLetter | None = None
    """The fate of messages behind a dead letter in their order; None: as the settings say."""
    on_expiry: OnExpiry | None = None
    """The fate of an expired message; None: as the settings say."""
    fair_by: str | None = None
    """The header, or `key`, that names the tenant of a message; None: first come, first served."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """The number of messages of a tenant that are handled in its turn, 1 by default."""
    is_async: bool = field(init=False)
    takes_list: bool = field(init=False)
    """True if the handler is called once with all messages of its transaction."""
    _injected: _Injected = field(init=False, repr=False)

    def __post_init__(self) -> None:
        signatures.refuse_unfit(self.function, self.name)
        refuse_misfits(f"handler {self.name}", self._given())
        refuse_verdicts(f"handler {self.name}", self.by_error)
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise InvalidSetting(f"{self.name}: timeout must be above 0 (got {self.timeout})")
        if self.max_batch < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise InvalidSetting(f"{self.name}: concurrency and max_batch must be at least 1")
        if self.on_dead_letter not in (None, "continue", "park"):
            raise InvalidSetting(f"{self.name}: on_dead_letter={self.on_dead_letter!r}; use 'continue' or 'park'")
        if self.on_expiry not in (None, "forget", "dead-letter"):
            raise InvalidSetting(f"{self.name}: on_expiry={self.on_expiry!r}; use 'forget' or 'dead-letter'")
        if self.fair_by is not None and (self.ordered or not self.fair_by):
            raise InvalidSetting(f"{self.name}: fair_by= names a header or 'key', and an ordered handler has no turns")
        if self.weights and (self.fair_by is None or any(weight < 1 for weight in self.weights.values())):
            raise InvalidSetting(f"{self.name}: weights= are whole numbers from 1 on, for the tenants of fair_by=")
        is_async = inspect.iscoroutinefunction(self.function)
        object.__setattr__(self, "is_async", is_async)
        object.__setattr__(self, "takes_list", _takes_list(self.function, self.cls, of=self.name))
        if self.takes_list and self.inherit_deliver_by:
            raise InvalidSetting(f"{self.name}: a list of messages has no one deliver_by to inherit; take them singly")
        object.__setattr__(self, "_injected", _resolve(self.function, self.cls, is_async=is_async, of=self.name))
        if self.takes_list and self._injected.takes(_CONTEXT):
            raise InvalidSetting(
                f"handler {self.name}: a provider takes a Context, and there is no one Context for a list of messages; "
                "take them singly, or leave the Context out"
            )

    @property
    def name(self) -> str:
        return signatures.dotted_name(self.function)

    @property
    def returns(self) -> Sequence[type]:
        """The classes of the messages that it returns, by its annotation."""
        return signatures.returned_classes(signatures.hints_of(self.function, self.name).get("return"))

    def _given(self) -> list[Argument]:
        """The parameters of Bus.handles()."""
        hints = annotations_of(Handler)
        given = [each.name for each in fields(self) if each.init]
        return [Argument(_SHOWN_AS.get(name, name), getattr(self, name), hints[name]) for name in given]

    def cause(self, envelope: Envelope) -> Cause:
        """Return the cause for messages that follow from this one."""
        return Cause(envelope, envelope.deliver_by if self.inherit_deliver_by else None, handler=self.name)

    def cause_of_list(self, envelopes: Sequence[Envelope]) -> Cause:
        """The same for all messages of one call: their list sends the same ids each time, and is no conversation."""
        return Cause(None, handler=self.name, ids=[envelope.id for envelope in envelopes])

    @property
    def takes_session(self) -> bool:
        """True when the handler, or a provider, is given the session."""
        return self._injected.takes(_SESSION)

    @property
    def share_of(self) -> Callable[[Envelope], str] | None:
        """Function that returns the tenant of a message; None without fair_by."""
        return None if self.fair_by is None else partial(share_of, header=self.fair_by)

    async def run(self, call: Incoming) -> Any:
        """Run an async handler, send the messages that it returned, and return them."""
        failures: list[BaseException] = []
        async with AsyncExitStack() as stack:
            with _noted(failures):
                result = await self._injected.call(call, stack)
        _raise_swallowed(failures)
        call.context.cascade(result)
        return result

    def run_sync(self, call: Incoming) -> Any:
        """Run a sync handler in the calling thread, as run() does."""
        try:
            failures: list[BaseException] = []
            with ExitStack() as stack, _noted(failures):
                result = self._injected.call_sync(call, stack)
            _raise_swallowed(failures)
            call.context.cascade(result)
            return result
        except (StopIteration, GeneratorExit) as error:  # no Future can carry them; coroutines do the same (PEP 479)
            raise RuntimeError(f"the handler raised {type(error).__name__}") from error


@contextmanager
def _noted(failures: list[BaseException]) -> Iterator[None]:
    """Note the error that ends this block: a provider around it may not make a success of the handler's failure."""
    try:
        yield
    except BaseException as error:
        failures.append(error)
        raise


def _raise_swallowed(failures: list[BaseException]) -> None:
    if failures:
        raise failures.pop()


def refuse_verdicts(of: str, errors: Iterable[type[Exception]]) -> None:
    """Raise InvalidSetting for a rule for an error that is a handler's own decision."""
    for error in errors:
        if issubclass(error, Verdict):
            raise InvalidSetting(f"{of}: {error.__name__} is a verdict of the handler, and is obeyed as it is")


def _resolve(
    function: Callable[..., Any], cls: type[Any], *, is_async: bool, of: str, within: Sequence[Any] = ()
) -> _Injected:
    direct: dict[str, _Source] = {}
    dependencies: dict[str, _Injected] = {}
    hints = signatures.hints_of(function, of)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        provider = next((extra.provider for extra in signatures.extras(hint) if isinstance(extra, Depends)), None)
        if provider is not None:
            if provider in within:
                raise InvalidSetting(f"handler {of}: {signatures.dotted_name(provider)} depends on itself")
            if not is_async and (inspect.iscoroutinefunction(provider) or inspect.isasyncgenfunction(provider)):
                raise InvalidSetting(
                    f"handler {of}: a sync handler cannot depend on the async {signatures.short_name(provider)}"
                )
            dependencies[name] = _resolve(provider, cls, is_async=is_async, of=of, within=(*within, provider))
            continue
        signatures.refuse_parameter(parameter, hint, [cls, AsyncSession, Session, Context], of)
        if hint is cls or hint == GenericAlias(list, (cls,)):
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
                f"handler {of}: parameter {name!r} has no known type; annotate it with "
                f"{cls.__name__}, AsyncSession, Session, "
                "Context or Annotated[T, Depends(provider)]"
            )
    return _Injected(function, direct, dependencies)


def _takes_list(function: Callable[..., Any], cls: type[Any], *, of: str) -> bool:
    hints = [hint for name, hint in signatures.hints_of(function, of).items() if name != "return"]
    takes_list = GenericAlias(list, (cls,)) in hints
    if takes_list and Context in hints:
        raise InvalidSetting(f"handler {of}: there is no one Context for a list of messages; take them singly")
    return takes_list
