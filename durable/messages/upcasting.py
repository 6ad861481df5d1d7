"""Old versions of a message for the handler of a new one: upcasters, which are pure functions from class to class.

    orders.order-placed --upcaster--> orders.order-placed.v2 --upcaster--> orders.order-placed.v3, which is handled
        (sent by services, or stored by nodes, whose code is older)

A handler gets every version from which a chain leads to its class, so that a service can be deployed before those that
send to it. A message keeps the type under which it was sent; it is decoded as the class of that type, and made a newer
one after that, each time that it is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from durable.arguments import checked
from durable.errors import InvalidMessage, InvalidSetting, said
from durable.messages import codec
from durable.messages.registry import name_of

Old = TypeVar("Old")
New = TypeVar("New")


@dataclass(frozen=True, slots=True)
class Upcaster:
    """Upcaster: a step from a class to the next."""

    old: type[Any]
    new: type[Any]
    function: Callable[[Any], Any]

    def __call__(self, message: object) -> Any:
        """The same message as the newer class; raises InvalidMessage."""
        try:
            newer = self.function(message)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the application's function, and extensions that panic
            raise InvalidMessage(f"upcaster {self.name} failed: {said(error)}") from error
        if not isinstance(newer, self.new):
            raise InvalidMessage(
                f"upcaster {self.name} returned {type(newer).__qualname__}, not "
                f"{self.new.__qualname__}; correct the upcaster"
            )
        return newer

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"


class Encoded(Protocol):
    """A body, and what must be known to read it: an envelope, or part of one."""

    @property
    def message_type(self) -> str: ...
    @property
    def content_type(self) -> str: ...
    @property
    def body(self) -> bytes: ...


_steps: dict[str, Upcaster] = {}
"""The upcasters by the type that they convert."""


@checked
def upcaster(old: type[Old], *, to: type[New]) -> Callable[[Callable[[Old], New]], Callable[[Old], New]]:
    """Declare how a message of an old class becomes one of the next: `@upcaster(OrderPlacedV1, to=OrderPlaced)`.

    The function must give the same result each time. When it raises, its message becomes a dead letter at once. Both
    classes are messages, and an old one has one upcaster; the names may differ, for a type may be renamed. Raises
    InvalidSetting otherwise, or when a chain would never end, and UnknownMessageType.
    """
    old_type, new_type = name_of(old), name_of(to)
    if old_type in (new_type, *newer_types(new_type)):
        raise InvalidSetting(
            f"upcaster from {old_type} to {new_type}: the chain leads back to where it began; leave one step out"
        )

    def declare(function: Callable[[Old], New]) -> Callable[[Old], New]:
        if not inspect.isroutine(function):
            raise InvalidSetting(f"upcaster from {old_type}: give a function, not {function!r}")
        step = Upcaster(old, to, function)
        if inspect.iscoroutinefunction(function):
            raise InvalidSetting(f"upcaster {step.name}: must be a plain function, without I/O")
        known = _steps.get(old_type)
        if known is not None and known.name != step.name:
            raise InvalidSetting(f"{old_type} is upcast by {known.name} already; chain the versions one by one")
        _steps[old_type] = step
        return function

    return declare


def newer_types(message_type: str) -> Iterator[str]:
    """Return the types that messages of this type become, step by step."""
    while (step := _steps.get(message_type)) is not None:
        message_type = name_of(step.new)
        yield message_type


def oldest_type(message_type: str) -> str:
    """The first version of this type: what the code of any time calls the stream of all its versions."""
    while older := sorted(old for old, step in _steps.items() if name_of(step.new) == message_type):
        message_type = older[0]
    return message_type


def upcast_types() -> list[str]:
    """The types that have an upcaster."""
    return list(_steps)


def sent_class(message_type: str, cls: type[Any]) -> type[Any]:
    """The class as which a message of this type was sent that arrives as `cls`: an older one, or `cls` itself."""
    chain = _chain(message_type, cls)
    return chain[0].old if chain else cls


def decode(encoded: Encoded, cls: type[Any]) -> Any:
    """The message in this envelope as this class, upcast if it was sent as an older one; raises InvalidMessage."""
    chain = _chain(encoded.message_type, cls) if encoded.message_type in _steps else ()
    message = codec.decode(encoded.body, chain[0].old if chain else cls, encoded.content_type)
    for step in chain:
        message = step(message)
    return message


def _chain(message_type: str, cls: type[Any]) -> list[Upcaster]:
    """The steps from this type to this class; none when it is of this class as it is."""
    chain: list[Upcaster] = []
    while (step := _steps.get(message_type)) is not None and step.old is not cls:
        chain.append(step)
        if step.new is cls:
            return chain
        message_type = name_of(step.new)
    return []
