"""Texts that viewers read of the state of a service: each text of Gauges, set to its own name."""

from __future__ import annotations

import typing
from collections import abc
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

from durable.console import viewers
from durable.storage.gauges import Gauges

SHOWN: Final = {
    "unowned.name",
    "late_schedules.name",
    "parked.key_id",
    "behind",
    "parked_types",
    "circuits.kind",
    "circuits.key",
    "circuits.actor",
    "circuits.ordering_key",
    "open_circuits",
    "nodes.service",
    "nodes.description",
    "nodes.version",
    "nodes.capabilities",
    "estimates",
}
"""Names, which are no contents of messages."""
ERRORS: Final = {"circuits.reason", "late_schedules.error"}
VALUES: Final[Mapping[Any, object]] = {
    int: 1,
    bool: True,
    datetime: datetime(2030, 1, 1, tzinfo=UTC),
    timedelta: timedelta(hours=1),
    type(None): None,
}


def made(kind: Any, name: str) -> Any:
    """Make a value of a type whose texts are its name."""
    kind = getattr(kind, "__supertype__", kind)
    if kind is str:
        return name
    if kind in VALUES:
        return VALUES[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return kind(**{each: made(hints[each], f"{name}.{each}".lstrip(".")) for each in kind._fields})
    container, parts = typing.get_origin(kind), [made(each, name) for each in typing.get_args(kind)]
    if container is abc.Mapping:
        return dict([parts])
    if container in (abc.Sequence, abc.Collection):
        return parts
    return {*parts} if container is set else parts[0]


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts(list(value.items()))
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from texts(each)


def test_texts_of_gauges_are_names_alone_for_viewers() -> None:
    read = made(Gauges, "")
    sides = {"outgoing"}
    assert set(texts(read)) - sides == SHOWN | ERRORS
    assert set(texts(viewers.of_gauges(read))) - sides == SHOWN | {viewers.HIDDEN}
