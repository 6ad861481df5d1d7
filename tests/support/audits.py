"""Many cases for one run of the audit: each has ids, services and addresses of its own, so that none meets another.

rows of case 1 ── own(1, row) ──┐                         ┌── part(1, verdict) ──> as of an audit of case 1 alone
                                ├──> audit ──> verdict ───┤
rows of case 2 ── own(2, row) ──┘                         └── part(2, verdict) ──> as of one of case 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from durable.pipeline.audit import Verdict
from durable.pipeline.matching import FINDINGS
from tests.support.lakes import message_id

_IDS: Final = 1 << 32  # of each case


def with_own_id(case: int, row: Mapping[str, Any]) -> dict[str, Any]:
    number = row["id"]
    return {**row, "id": number and message_id(case * _IDS + number.int)}


def numbered(id_text: str) -> tuple[int, int]:
    """The case that a message belongs to, and its number there."""
    return divmod(UUID(id_text).int, _IDS)


def own(case: int, row: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: own_service(case, row[name]) for name in ("service", "source")}
    address = f"{row['address']}/{case}" if row["side"] == "outgoing" else row["address"]
    return {**with_own_id(case, row), **names, "address": address}


def own_service(case: int, service: str) -> str:
    return f"{service}-{case}"


def part(case: int, verdict: Verdict) -> Verdict:
    """What an audit of one case alone would say. All findings must be among the examples."""
    assert len(verdict.examples) == sum(verdict.counts.values())
    spans, totals = ([row for row in rows if _is_of(case, row)] for rows in (verdict.spans, verdict.totals))
    examples = [row for row in verdict.examples if numbered(row["id"])[0] == case]
    counts = Counter(row["finding"] for row in examples)
    return replace(
        verdict,
        sent_until=_until("outgoing", spans),
        received_until=_until("incoming", spans),
        spans=spans,
        totals=totals,
        counts={kind: counts[kind] for kind in FINDINGS},
        examples=examples,
    )


def _is_of(case: int, row: Mapping[str, Any]) -> bool:
    return str(row["service"]).endswith(own_service(case, ""))


def _until(side: str, spans: Sequence[Mapping[str, Any]]) -> datetime | None:
    return min((span["until"] for span in spans if span["side"] == side and span["until"]), default=None)
