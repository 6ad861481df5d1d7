"""Contents taken out of what viewers read: bodies, headers, and the texts of errors, which may quote both.

They are taken out where they are read, so no template can show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from durable.agents.startup_check import BEFORE_ITS_START
from durable.storage.circuits import BY_CODE, CircuitKind, OpenCircuit
from durable.storage.dead_letters import Attempt, DeadLetter, Group, Summary
from durable.storage.gauges import Gauges
from durable.storage.receipts import Standing
from durable.storage.schedules import Row

HIDDEN: Final = "(for operators)"


def of_groups(groups: Sequence[Group]) -> list[Group]:
    return [replace(group, example=HIDDEN) for group in groups]


def of_summaries(summaries: Sequence[Summary]) -> list[Summary]:
    return [summary._replace(reason=HIDDEN) for summary in summaries]


def of_letter(letter: DeadLetter) -> DeadLetter:
    (summary,) = of_summaries([letter.summary])
    return msgspec.structs.replace(letter, summary=summary, headers={}, body=b"", edited_body=None, traceback=None)


def of_attempts(attempts: Sequence[Attempt]) -> list[Attempt]:
    return [each._replace(reason=HIDDEN, traceback="") for each in attempts]


def of_standings(standings: Sequence[Standing]) -> list[Standing]:
    return [each if each.reason is None else each._replace(reason=HIDDEN) for each in standings]


def of_schedules(schedules: Sequence[Row]) -> list[Row]:
    return [each if each.error is None else each._replace(error=HIDDEN) for each in schedules]


def of_gauges(read: Gauges) -> Gauges:
    late = [each if each.error is None else each._replace(error=HIDDEN) for each in read.late_schedules]
    return read._replace(circuits=of_circuits(read.circuits), late_schedules=late)


def of_circuits(circuits: Sequence[OpenCircuit]) -> list[OpenCircuit]:
    """Hide the reasons that code gave; an operator's are for everybody, and so is why a destination is latched."""
    return [
        each._replace(reason=HIDDEN) if each.kind != CircuitKind.DESTINATION and _is_of_code(each) else each
        for each in circuits
    ]


def _is_of_code(circuit: OpenCircuit) -> bool:
    return circuit.probing or circuit.actor.startswith("node ") or circuit.actor.endswith((BEFORE_ITS_START, BY_CODE))
