"""Message types: a stable name on the wire for each class, and nothing that is found by importing a name.

A class is registered by @message("orders.order-placed"). The name, not the module path, is what is stored and sent,
so that classes may move; a name that is not registered is never imported, it becomes a dead letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

from durable.arguments import Argument, checked_names, refuse_misfits
from durable.envelope import JSON, is_media_type
from durable.errors import InvalidSetting, UnknownMessageType
from durable.grammar import suggestion
from durable.messages import codec
from durable.messages.versions import versioned
from durable.plain import plain_text

T = TypeVar("T")

_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)*")
_MOST_SHOWN = 40  # characters of a name that is too long
_MAX_NAME = 200  # a RabbitMQ routing key holds 255 bytes, and the service's name goes before it

_by_name: dict[str, type] = {}
_by_class: dict[type, str] = {}
_content_types: dict[type, str] = {}
_encrypted: set[str] = set()


@checked_names
def message(
    name: str, *, version: int = 1, content_type: str = JSON, encrypted: bool = False
) -> Callable[[type[T]], type[T]]:
    """Register a class (msgspec Struct, dataclass, pydantic model or attrs class) under a stable name.

    `name` is dotted lower case, like "orders.order-placed". A new `version` is a type of its own, stored as
    "orders.order-placed.v2"; durable.upcaster() makes it of the one before. `content_type` says how it is encoded
    (messages.codec). `encrypted`: bodies are encrypted before they are stored or sent, with the keys of the bus. Raises
    InvalidSetting for another form, a name that another class has, or a class that its codec cannot encode.
    """
    if isinstance(name, type):
        raise InvalidSetting(f"message: {name.__qualname__}: write @message('orders.order-placed'), with a name")
    given = (
        *(("name", name, str), ("version", version, int), ("content_type", content_type, str)),
        ("encrypted", encrypted, bool),
    )
    refuse_misfits("message", (Argument(*each) for each in given))
    if len(name) > _MAX_NAME:
        raise InvalidSetting(
            f"@message({name[:_MOST_SHOWN]!r}...): the name has {len(name)} characters; give {_MAX_NAME} at most"
        )
    if not _NAME.fullmatch(name):
        raise InvalidSetting(f"@message({name!r}): use dotted lower-case words, like 'orders.order-placed'")
    if version < 1:
        raise InvalidSetting(f"@message({name!r}): version must be at least 1")
    if not is_media_type(content_type):
        raise InvalidSetting(
            f"@message({name!r}): {content_type!r} is no content type; write it like 'application/msgpack'"
        )
    full_name = versioned(plain_text(name), version)

    def register(cls: type[T]) -> type[T]:
        if not isinstance(cls, type):
            raise InvalidSetting(f"@message({full_name!r}): {cls!r} is no class")
        known = _by_name.get(full_name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InvalidSetting(
                f"@message({full_name!r}) is taken by {known.__module__}.{known.__qualname__}; choose another name"
            )
        _check_codec(cls, full_name, content_type)
        _by_name[full_name] = cls
        _by_class[cls] = full_name
        _content_types[cls] = content_type
        (_encrypted.add if encrypted else _encrypted.discard)(full_name)
        return cls

    return register


def _check_codec(cls: type, name: str, content_type: str) -> None:
    """Check the codec of a class as far as it is known; later declarations are checked when the bus starts."""
    if content_type not in codec.content_types():
        return
    try:
        codec.check_class(cls, content_type)
    except NameError:
        pass
    except InvalidSetting as error:
        raise InvalidSetting(f"@message({name!r}): {error}") from error


def name_of(cls: type) -> str:
    """The registered name of a class; raises UnknownMessageType."""
    try:
        return _by_class[cls]
    except KeyError:
        if issubclass(cls, type):
            raise UnknownMessageType("a class is no message: send an instance, such as OrderPlaced(...)") from None
        if cls.__module__ == "builtins":
            raise UnknownMessageType(
                f"{cls.__name__} is not a message: give an instance of a class that is declared by @message(name)"
            ) from None
        raise UnknownMessageType(f"{cls.__qualname__} is not a message: decorate it with @message(name)") from None


def is_message(hint: Any) -> TypeGuard[type]:
    """True for a class that was declared with @message; false for other classes, and for whatever else annotates."""
    return isinstance(hint, type) and hint in _by_class


def class_name(name: str) -> str:
    """The class registered under a name, as code calls it; or the name, which may be one of another service."""
    return _by_name[name].__name__ if name in _by_name else name


def content_type_of(cls: type) -> str:
    """Return the content type of messages of this class."""
    return _content_types.get(cls, JSON)


def is_encrypted(name: str) -> bool:
    """True for the type of a class that was declared with encrypted=True."""
    return name in _encrypted


def encrypted_types() -> list[str]:
    """Return the types that were declared with encrypted=True."""
    return sorted(_encrypted)


def class_of(name: str) -> type:
    """The class registered under a name; raises UnknownMessageType. Never imports anything."""
    try:
        return _by_name[name]
    except KeyError:
        raise UnknownMessageType(
            f"unknown message type: no @message is registered as {name!r}{suggestion(name, _by_name)}"
        ) from None


def registered() -> Iterator[tuple[str, type]]:
    yield from _by_name.items()
