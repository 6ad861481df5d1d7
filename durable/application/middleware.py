"""Middleware: code of the application around everything that is sent, and around every run of a handler.

    bus.use(component, stage="before" | "core" | "after")

    send()  -->  before --> core --> after --> composed, remembered by the unit of work     --> id
    handle  -->  before --> core --> after --> the handler, inside its message's transaction; what it returns is sent

One component may stand in both onions. Within a stage the order is that of `use()`. Each component calls the rest of
its onion, or does not, or calls it again; it may give it another message, and change what comes back. The onions are
built once, of those components only that override the side: a side that nobody overrides is the plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Literal, get_args
from uuid import UUID

from durable.application.incoming import Incoming
from durable.errors import InvalidSetting, WiringError
from durable.outbox.envelope_factory import Outgoing, Send

Stage = Literal["before", "core", "after"]
SendNext = Send
"""Sends a message through the rest of the onion; returns its id, or None when it was dropped."""
HandleNext = Callable[[Incoming], Awaitable[object]]
"""Handles a message in the rest of the onion; returns what the handler returned, which has been sent then."""


class Middleware:
    """Middleware component: it overrides `send`, `handle` or both, and runs around those that follow it."""

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        """Run around one message that is sent: by send(), publish(), reply(), or as returned by a handler.

        Returns the message's id, or None to drop the message, which its sender does not notice. A second call of
        `call_next` sends a second message. Errors raised here reach the sender.
        """
        return call_next(outgoing)

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        """Run around one call of a handler, inside the transaction that finishes its message.

        Messages that the handler returns are sent within `call_next`, which then returns them; the value returned here
        is seen by the outer components only. Without `call_next` the message is finished and its handler has not run.
        An error raised here counts as raised by the handler, also verdicts such as Reject.
        """
        return await call_next(incoming)


class MiddlewareStack:
    """The components of one bus, and the two onions that are built of them."""

    def __init__(self) -> None:
        self._stages: dict[str, list[Middleware]] = {stage: [] for stage in get_args(Stage)}
        self._is_built = False

    def use(self, component: Middleware, stage: Stage) -> None:
        """Add a component to a stage. Raises WiringError when an onion was built already, and InvalidSetting."""
        if self._is_built:
            raise WiringError("use(): the bus has begun to work; declare middleware before it starts or sends")
        if stage not in self._stages:
            raise InvalidSetting(f"use(): there is no stage {stage!r}; use 'before', 'core' or 'after'")
        _check(component)
        self._stages[stage].append(component)

    def around_sending(self, send: SendNext) -> SendNext:
        """`send` within the components that override send()."""
        for component in reversed(self._components("send")):
            send = _sending(component, send)
        return send

    def around_handling(self, handle: HandleNext) -> HandleNext:
        """`handle` within the components that override handle()."""
        for component in reversed(self._components("handle")):
            handle = _handling(component, handle)
        return handle

    @property
    def handles(self) -> bool:
        """True when a component overrides handle()."""
        return bool(self._components("handle"))

    def _components(self, side: Literal["send", "handle"]) -> list[Middleware]:
        self._is_built = True
        passing = getattr(Middleware, side)
        used = (component for stage in self._stages.values() for component in stage)
        return [component for component in used if getattr(type(component), side) is not passing]


def _sending(component: Middleware, call_next: SendNext) -> SendNext:
    send = component.send
    return lambda outgoing: send(outgoing, call_next)


def _handling(component: Middleware, call_next: HandleNext) -> HandleNext:
    handle = component.handle  # its coroutine is the caller's to await: a layer costs one coroutine, not two
    return lambda incoming: handle(incoming, call_next)


def _check(component: Middleware) -> None:
    name = getattr(component, "__qualname__", type(component).__qualname__)
    if not isinstance(component, Middleware):
        raise InvalidSetting(f"use(): {name} is no Middleware: derive it from durable.Middleware and use an instance")
    if inspect.iscoroutinefunction(component.send):
        raise InvalidSetting(f"use(): {name}.send must not be async: send() waits for nothing")
    if not inspect.iscoroutinefunction(component.handle):
        raise InvalidSetting(f"use(): {name}.handle must be async, also around sync handlers")
