"""The value of each parameter of a handler, and of the functions that it depends on.

A parameter is known by its annotation: the message's class, AsyncSession (async handlers) or Session (sync ones),
Context, or Annotated[T, Depends(f)]. f is called for each attempt, with parameters of the same kinds; it may be async,
or a generator that cleans up after its yield. Everything is resolved when the handler is declared, so a mistake stops
the application at its start and not at its first message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import cached_property
from types import GenericAlias
from typing import Any, NamedTuple, Protocol

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.application import signatures
from durable.application.incoming import Context, Incoming
from durable.arguments import checked_class
from durable.errors import InvalidSetting
from durable.grammar import with_article
from durable.messages import registry


@checked_class
@dataclass(frozen=True, slots=True)
class Depends:
    """Marker for a handler's parameter that `provider` makes: `Annotated[Mailer, Depends(mailer)]`."""

    provider: Callable[..., Any]


class Source(Protocol):
    """Source of the value of a parameter."""

    def __call__(self, call: Incoming) -> Any: ...


MESSAGE: Source = lambda call: call.message  # noqa: E731
SESSION: Source = lambda call: call.session  # noqa: E731
CONTEXT: Source = lambda call: call.context  # noqa: E731


@dataclass(frozen=True)
class Injected:
    """A function with the sources of its parameters; `dependencies` are functions of the same kind."""

    function: Callable[..., Any]
    direct: Mapping[str, Source]
    dependencies: Mapping[str, Injected]

    @cached_property
    def _opens(self) -> Callable[..., AbstractAsyncContextManager[Any]] | None:
        return asynccontextmanager(self.function) if inspect.isasyncgenfunction(self.function) else None

    @cached_property
    def _opens_sync(self) -> Callable[..., AbstractContextManager[Any]] | None:
        return contextmanager(self.function) if inspect.isgeneratorfunction(self.function) else None

    def takes(self, source: Source) -> bool:
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


class Asking(NamedTuple):
    """The handler whose parameters are to be found, also those of its dependencies."""

    name: str
    cls: type[Any]
    is_async: bool
    takes_list: bool = False

    def known_types(self) -> str:
        """The annotations that a parameter may have."""
        message = f"list[{self.cls.__name__}]" if self.takes_list else self.cls.__name__
        session = "AsyncSession" if self.is_async else "Session"
        context = [] if self.takes_list else ["Context"]
        return f"{', '.join([message, session, *context])} or Annotated[T, Depends(provider)]"


def resolve(function: Callable[..., Any], asking: Asking, *, within: Sequence[Any] = ()) -> Injected:
    """Find the source of each parameter. Raises InvalidSetting for one that has none."""
    of, cls, is_async, _ = asking
    direct: dict[str, Source] = {}
    dependencies: dict[str, Injected] = {}
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
            dependencies[name] = resolve(provider, asking, within=(*within, provider))
            continue
        signatures.refuse_parameter(parameter, hint, [cls, AsyncSession, Session, Context], of)
        if hint is cls or hint == GenericAlias(list, (cls,)):
            direct[name] = MESSAGE
        elif hint is Context:
            direct[name] = CONTEXT
        elif hint is (AsyncSession if is_async else Session):
            direct[name] = SESSION
        elif hint in (AsyncSession, Session):
            right = "AsyncSession in an async" if is_async else "Session in a sync"
            raise InvalidSetting(f"handler {of}: {name} must be annotated {right} handler")
        elif parameter.default is inspect.Parameter.empty and registry.is_message(hint):
            raise InvalidSetting(
                f"handler {of}: parameter {name!r} is {with_article(hint.__name__)}, but this handler handles "
                f"{cls.__name__}: annotate it with {cls.__name__}, or declare @bus.handles({hint.__name__})"
            )
        elif parameter.default is inspect.Parameter.empty:
            raise InvalidSetting(
                f"handler {of}: parameter {name!r} has no known type; annotate it with {asking.known_types()}"
            )
    return Injected(function, direct, dependencies)


def takes_list(function: Callable[..., Any], cls: type[Any], *, of: str) -> bool:
    """Tell whether a handler is called with a list of messages."""
    hints = [hint for name, hint in signatures.hints_of(function, of).items() if name != "return"]
    is_list = GenericAlias(list, (cls,)) in hints
    if is_list and Context in hints:
        raise InvalidSetting(f"handler {of}: there is no one Context for a list of messages; take them singly")
    return is_list
