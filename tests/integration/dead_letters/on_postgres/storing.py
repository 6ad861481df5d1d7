"""Messages that are stored, claimed and failed, as the tests of dead letters need them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from durable import message
from durable.agents.context import AgentContext
from durable.agents.intake import LeftToOthers
from durable.agents.receiving import ReceivingAgent
from durable.dead_letters.bulk import Resolution
from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId
from durable.messages.ordering import OrderingRules
from durable.settings import load_settings
from durable.storage import dead_letters, inbox, ordering
from durable.storage.database import Database
from durable.storage.dead_letters import LetterRange, Selection
from durable.storage.inbox import Arrival
from durable.storage.ordering import Claimed
from durable.storage.rows import Failure
from durable.storage.sql import dead_letters as letter_statements
from durable.storage.sql.statement import Statement
from durable.testing import ManualClock
from tests.failure import leftovers
from tests.support.letters import ENDPOINT, NODE, SCHEMA
from tests.support.tables import Tables

ALL = Selection()
WHOLE = LetterRange(0, 2**40, 1_000)
OTHER = NodeId(8)
QUICK: dict[str, Any] = {
    "poll_interval": timedelta(milliseconds=30),
    "heartbeat_interval": timedelta(milliseconds=100),
    "drain_timeout": timedelta(seconds=5),
}


replay_by_ada: Resolution = partial(dead_letters.replay, actor="ada", reason="mended")


@message("letters.placed")
class Placed(msgspec.Struct):
    number: int


def given(tables: Tables, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a transaction of its own."""
    with leftovers.transaction(tables.url) as conn:
        return function(conn, *args, **kwargs)


def stored(tables: Tables, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same, for a function of storage."""
    return given(tables, function, SCHEMA, *args, **kwargs)


def failure(number: int) -> Failure:
    return Failure(number, datetime.now(UTC), "ValueError", f"reason {number}", f"traceback {number}")


def claim(tables: Tables, node: NodeId = NODE) -> list[LeasedEnvelope]:
    claimed: list[LeasedEnvelope] = stored(
        tables, inbox.claim, message_type="letters.placed", batch_size=1_000, node=node
    )
    return claimed


def claim_key(tables: Tables, key: str) -> list[LeasedEnvelope]:
    turns = ordering.Turns([ordering.Turn(key)], {"letters.placed": "letters.placed"})
    found: Claimed = stored(tables, ordering.claim, turns, batch_size=1_000, node=NODE)
    return found.leases


def remove(monkeypatch: pytest.MonkeyPatch, name: str, guard: str, instead: str = "") -> None:
    """Take a guard out of a statement."""
    statement: Statement = getattr(letter_statements, name)
    assert guard in statement._sql, f"{name} has no {guard!r}: name its guard anew"
    monkeypatch.setattr(letter_statements, name, Statement(statement._sql.replace(guard, instead)))


both_ways = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


def store(conn: Connection, envelopes: list[Any]) -> None:
    inbox.store(conn, SCHEMA, [Arrival(ENDPOINT, each, ANY_NODE) for each in envelopes])


def receiving_agent(
    database: Database, clock: ManualClock | None = None, places: OrderingRules | None = None
) -> ReceivingAgent:
    context = AgentContext(database, ANY_NODE, load_settings(), clock or ManualClock())
    return ReceivingAgent(context, LeftToOthers(), places=places)
