"""`ctx.circuit`: what a handler may stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from durable.arguments import checked, length_of_time
from durable.duration import Duration
from durable.errors import InvalidSetting
from durable.storage.circuits import CircuitKind


class PauseRequest(NamedTuple):
    """Request to pause on every node, for this time or until it is resumed."""

    kind: CircuitKind
    key: str
    time: timedelta | None
    reason: str

    def of(self, handler: str) -> tuple[CircuitKind, str]:
        """Return the circuit to pause. A message may be of an older version, its handler is not."""
        return self.kind, handler if self.kind is CircuitKind.HANDLER else self.key


class CircuitControl:
    """Opens circuits from within a handler."""

    def __init__(
        self, message_type: str, asked: list[PauseRequest], destinations_of: Callable[[str], Sequence[str]]
    ) -> None:
        self._message_type = message_type
        self._asked = asked
        self._destinations_of = destinations_of

    @checked
    def open(
        self,
        for_: Duration | None = None,
        *,
        reason: str = "opened by its handler",
        destination: str | None = None,
    ) -> None:
        """Stop this handler, or sending to this destination, on every node for a time (seconds, "10m" or a timedelta).

        Without a time the circuit stays open until an operator resumes it. It opens when the attempt ends, whether the
        attempt commits or fails; the handler decides on its message as usual, by its return or its exception.
        """
        time = None if for_ is None else length_of_time("circuit.open", "for_", for_)
        if time is not None and time <= timedelta(0):
            raise InvalidSetting(f"circuit.open: for_={for_!r} is over before it begins; give a time above 0, or none")
        if destination is None:
            self._asked.append(PauseRequest(CircuitKind.HANDLER, self._message_type, time, reason))
        else:
            keys = self._destinations_of(destination)
            self._asked += [PauseRequest(CircuitKind.DESTINATION, key, time, reason) for key in keys]
