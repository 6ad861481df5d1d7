"""The guards, by the room that they stand in."""

from __future__ import annotations

from typing import Final

from tests.mutants.guards import (
    calls,
    console,
    doors,
    embedded,
    handling,
    lakes,
    lives,
    order,
    outbox,
    receiving,
    recovery,
    sending,
    storage,
    wire,
)
from tests.mutants.mutant import Mutant

GUARDS: Final[tuple[Mutant, ...]] = (
    *outbox.ROWS,
    *handling.ROWS,
    *receiving.ROWS,
    *sending.ROWS,
    *order.ROWS,
    *recovery.ROWS,
    *storage.ROWS,
    *embedded.ROWS,
    *wire.ROWS,
    *doors.ROWS,
    *calls.ROWS,
    *console.ROWS,
    *lives.ROWS,
    *lakes.ROWS,
)
