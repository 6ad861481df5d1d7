"""Refusals of a declaration by the broker, and advice for each.

PRECONDITION_FAILED   it is there with other arguments
NOT_FOUND             it was to be there already
ACCESS_REFUSED        this user may not
RESOURCE_LOCKED       it is another connection's own
"""

from __future__ import annotations

import re
from typing import Final

from durable.transports.rabbitmq.topology import Queue, Thing

_DIFFERENCE: Final = re.compile(r"inequivalent arg '([^']+)' for .* received (.+) but current is (.+)")
_QUOTED: Final = re.compile(r"'(.*?)'")
_NOT_SET: Final = "not set"
_LOSSLESS: Final = frozenset({"x-dead-letter-exchange", "x-dead-letter-routing-key", "x-max-priority", "x-queue-mode"})
_KINDS: Final = frozenset({"durable", "auto_delete", "exclusive"})


def explained(thing: Thing, said: str) -> str:
    """A sentence for the operator, from the broker's own words for closing the channel."""
    difference = _DIFFERENCE.search(said)
    if difference is not None:
        argument, asked, current = difference[1], _value(difference[2]) or "none", _value(difference[3]) or _NOT_SET
        return f"{thing}: its {argument} is {current}, and {asked} was asked for; {_advice(thing, argument, current)}"
    match said.partition(" ")[0], thing:
        case "NOT_FOUND", Queue(declared=False):
            return f"{thing}: there is none, and its address says declare=no; create it, or leave declare=no out"
        case "ACCESS_REFUSED", _:
            return f"{thing}: this user may not declare it; let rabbitmqctl set_permissions allow it ({said})"
        case "RESOURCE_LOCKED", _:
            return f"{thing}: it is exclusive to another connection; end that one, or choose another name"
        case _:
            return f"{thing}: the broker refuses it: {said}"


def _value(text: str) -> str | None:
    """The broker words it as `none`, `'classic'` or `the value 'classic' of type 'longstr'`."""
    quoted = _QUOTED.search(text)
    return None if quoted is None else quoted[1]


def _advice(thing: Thing, argument: str, current: str) -> str:
    if not isinstance(thing, Queue):
        return "give every service another name for it (amqp_exchange), or delete it"
    again = "delete it when it is empty: it is declared again"
    match argument:
        case "x-queue-type" if current in ("classic", _NOT_SET):
            return f"write type=classic in its address, or {again}"
        case "x-queue-type" if current == "quorum":
            return f"write type=quorum in its address, or {again}"
        case "x-max-length":
            change = "leave max_length out of" if current == _NOT_SET else f"write max_length={current} in"
            return f"{change} its address, or {again}"
        case "x-single-active-consumer":
            return f"write ordered={'no' if current == _NOT_SET else 'yes'} in its address, or {again}"
        case _ if argument in _KINDS:
            return again
        case _ if argument in _LOSSLESS:
            return f"listen on .../queue/{thing.name}?declare=no to take it as it is, or {again}"
        case _:
            return f"{again}; with declare=no the broker could drop confirmed messages"
