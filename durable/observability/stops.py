"""Stops: which open circuit stops the messages of which type.

    po.order      --handler po.order.v2-->   circuits of po.order (that version alone) and of po.order.v2
    po.order.v2   --handler po.order.v2-->   circuits of po.order.v2
    both          --ordered handler----->    park of its ordering key, under any name

A handler takes older versions of its message, too. Which ones, its nodes have said when they joined: a process without
their code knows it from them, and of a type that no node has named that its handler has the same name. While two
releases are alive a type may have a handler in each, and waits behind a circuit only when all of them are stopped.
A park stops an order, in which a type waits whose handler had another name when it was parked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.gauges import Gauges
from durable.storage.nodes import handlers_of


class Stops:
    """The open circuits of handlers, by the types of messages that they stop."""

    def __init__(self, gauges: Gauges) -> None:
        self._handlers = handlers_of(gauges.nodes, gauges.locked)
        self._parked_types = gauges.parked_types
        self._open: dict[str, list[OpenCircuit]] = {}
        self._parks: list[OpenCircuit] = []
        for each in gauges.circuits:
            if each.kind == CircuitKind.HANDLER and each.parked:
                self._parks.append(each)
            elif each.kind == CircuitKind.HANDLER:
                self._open.setdefault(each.key, []).append(each)

    def of(self, message_type: str) -> Sequence[OpenCircuit]:
        """Return the circuits that stop this type, a pause before a park: those of its version alone, or those of its
        newest handler.
        """
        stopping = self._all_of(message_type)
        return [each for each in stopping if each.key == stopping[0].key or each.parked]

    def waiting(self, circuit: OpenCircuit, by_type: Mapping[str, int], by_order: Mapping[str, int]) -> int:
        """Count the messages that this circuit of a handler or a key stops, of these numbers: of a park, and of a key,
        those of its order.
        """
        if circuit.order is not None:
            return by_order.get(circuit.order, 0)
        return sum(number for name, number in by_type.items() if circuit in self._all_of(name))

    def _all_of(self, message_type: str) -> list[OpenCircuit]:
        """Return the circuits behind which this type waits: the parks of its orders, and those of its handlers only
        when all of them are open.
        """
        handlers = self._handlers.get(message_type, [message_type])
        behind = handlers if all(each in self._open for each in handlers) else []
        named = [each for key in dict.fromkeys([message_type, *behind]) for each in self._open.get(key, ())]
        orders = self._parked_types.get(message_type, ())
        return named + [each for each in self._parks if each.order in orders]
