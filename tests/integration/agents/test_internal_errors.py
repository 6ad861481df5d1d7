"""Errors of durable itself: a message that meets one each time comes to an end, and its neighbours are handled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Retry, message
from durable.agents.delivery import Delivery
from durable.storage.rows import Failure
from durable.testing import eventually
from tests.failure.workbench import QUICK
from tests.support.tables import Tables

POISON, ATTEMPTS = 7, 3


@message("internal.placed")
class Placed(msgspec.Struct):
    number: int


def _break_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing that a handler raises be told."""

    def from_error(error: BaseException, **_: Any) -> Failure:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(Failure, "from_error", from_error)


def _break_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def runs_again(*_: Any) -> bool:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(Delivery, "_runs_again", runs_again)


def _break_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of a failed attempt fail, where its error is asked what it is."""

    def as_failure(*_: Any) -> BaseException:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(Delivery, "_as_failure", as_failure)


BREAKS = {"its failures": _break_failures, "its decisions": _break_decisions, "its ends": _break_ends}


@pytest.mark.parametrize("fault", BREAKS)
@pytest.mark.parametrize("max_batch", [1, 5, "auto"])
async def test_message_meeting_internal_errors_becomes_a_dead_letter(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, max_batch: Any, fault: str
) -> None:
    bus = Bus("shop", tables.url, **QUICK)

    @bus.handles(Placed, max_batch=max_batch, retry=Retry(immediate=0, delays=[0.0] * (ATTEMPTS - 1)))
    async def place(order: Placed, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO handled VALUES (:number)"), {"number": order.number})
        if order.number == POISON:
            raise ValueError("no")

    tables.execute("DROP TABLE IF EXISTS handled; CREATE TABLE handled (number integer)")
    BREAKS[fault](monkeypatch)
    async with bus.unit_of_work():
        for number in range(20):
            bus.send(Placed(number))
    async with bus:
        await eventually(lambda: tables.count("dead_letters") == 1, within=60)
        await eventually(lambda: tables.count("incoming_envelopes") == 0, within=60)
    assert tables.rows("SELECT number FROM handled ORDER BY number") == [n for n in range(20) if n != POISON]
    reason = f"its node died, or met an error of its own, {2 + ATTEMPTS} times while it held it"
    assert tables.one("SELECT reason FROM durable.dead_letters") == reason
