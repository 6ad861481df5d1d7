"""Stand-in for `circuits` of a bus in memory; its methods do the work of the functions of the same names in
durable.storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from durable.clock import Clock
from durable.messages.ordering import OrderingRules
from durable.storage.circuits import CircuitKind, Resumed, parked_key


@dataclass
class MemoryCircuit:
    reason: str
    since: datetime
    until: datetime | None
    actor: str
    probing: bool

    def has_ended(self, now: datetime) -> bool:
        return not self.probing and self.until is not None and self.until <= now

    def is_tried(self, now: datetime) -> bool:
        return self.probing and self.until is not None and self.until <= now


@dataclass
class MemoryCircuits:
    """Time is the bus's own clock; `places` tell the orders of ordered handlers."""

    clock: Clock
    places: OrderingRules = field(default_factory=OrderingRules)
    _rows: dict[tuple[str, str], MemoryCircuit] = field(default_factory=dict)
    _parks: dict[tuple[str, str, str], MemoryCircuit] = field(default_factory=dict)

    def of(self, kind: CircuitKind, key: str) -> MemoryCircuit | None:
        """The circuit, if it is open; a park stops an order."""
        return self._unparked(kind, key)

    def stops_order(self, ordering_key: str | None) -> bool:
        """Tell whether a park, or a pause of a key, stops the messages of this order."""
        if ordering_key is None:
            return False
        is_parked = any(order == ordering_key for *_, order in self._parks)
        return is_parked or self._unparked(CircuitKind.KEY, ordering_key) is not None

    def may_take(self, message_type: str) -> bool:
        circuit = self.of(CircuitKind.HANDLER, message_type)
        return circuit is None or circuit.is_tried(self.clock.now())

    def pause(self, kind: CircuitKind, key: str, *, reason: str, actor: str, duration: timedelta | None) -> None:
        known = self._unparked(kind, key)
        self._open(kind, key, reason, duration, actor, probing=False)
        if known is not None and not known.probing:
            self._rows[kind, key] = replace(self._rows[kind, key], since=known.since)

    def pause_at_least(
        self, kind: CircuitKind, key: str, *, reason: str, actor: str, duration: timedelta | None
    ) -> None:
        known, now = self._unparked(kind, key), self.clock.now()
        if known is None or known.probing:
            self._open(kind, key, reason, duration, actor, probing=False)
        elif known.until is not None and (duration is None or known.until < now + duration):
            until = None if duration is None else now + duration
            self._rows[kind, key] = MemoryCircuit(reason, known.since, until, actor, probing=False)

    def park(self, kind: CircuitKind, key: str, *, reason: str, actor: str, ordering_key: str) -> None:
        park = MemoryCircuit(reason, self.clock.now(), None, actor, probing=False)
        self._parks.setdefault((kind, key, ordering_key), park)

    def resume(self, kind: CircuitKind, key: str) -> Resumed:
        parks = self._parks_of(kind, key)
        if self._unparked(kind, key) is not None:
            del self._rows[kind, key]
            return Resumed(True, next((self._parks[each].reason for each in parks), None))
        for each in parks:
            del self._parks[each]
        return Resumed(bool(parks))

    def _parks_of(self, kind: CircuitKind, key: str) -> list[tuple[str, str, str]]:
        of_kind = [each for each in self._parks if each[0] == kind]
        names = {parked_key(kind, key)}
        orders: set[str | None] = {order for _, name, order in of_kind if name in names}
        if kind is CircuitKind.HANDLER:
            orders.add(self.places.of_type(key).ordering_key)
        names |= {name for _, name, order in of_kind if order in orders}
        return [each for each in of_kind if each[1] in names]

    def open_circuit(
        self, kind: CircuitKind, key: str, *, reason: str, actor: str, duration: timedelta | None = None
    ) -> None:
        if self._unparked(kind, key) is None:
            self._open(kind, key, reason, duration, actor, probing=True)

    def close_circuit(self, kind: CircuitKind, key: str) -> bool:
        circuit = self._unparked(kind, key)
        if circuit is None or not circuit.probing:
            return False
        del self._rows[kind, key]
        return True

    def put_off_probe(self, message_type: str, *, reason: str, shortest: timedelta, longest: timedelta) -> None:
        circuit, now = self._unparked(CircuitKind.HANDLER, message_type), self.clock.now()
        if circuit is not None and circuit.probing:
            circuit.reason = reason
            circuit.until = now + max(shortest, min(now - circuit.since, longest))

    def try_again(self, message_type: str) -> None:
        circuit = self._unparked(CircuitKind.HANDLER, message_type)
        if circuit is not None and circuit.probing:
            circuit.until = self.clock.now()

    def _unparked(self, kind: CircuitKind, key: str) -> MemoryCircuit | None:
        circuit = self._rows.get((kind, key))
        if circuit is not None and circuit.has_ended(self.clock.now()):
            del self._rows[kind, key]
            return None
        return circuit

    def _open(
        self, kind: CircuitKind, key: str, reason: str, duration: timedelta | None, actor: str, *, probing: bool
    ) -> None:
        now = self.clock.now()
        until = None if duration is None else now + duration
        self._rows[kind, key] = MemoryCircuit(reason, now, until, actor, probing)
