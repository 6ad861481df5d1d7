"""Bugs that are planted into durable, or into the tables, to see that the checks find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from msgspec.structs import replace

from durable.agents.attempts import Attempts
from durable.agents.latch import Latch
from durable.agents.receiving import ReceivingAgent
from durable.agents.sending import SendingAgent
from durable.envelope import NodeId
from durable.node import Node
from durable.outbox.outbox import Outbox
from durable.outcomes import STORED
from durable.recovery.dormant_nodes import DormantNodes
from durable.recovery.forgotten_rows import Forgotten
from durable.storage import inbox as storage_inbox
from durable.storage.sql import inbox, outbox, recovery
from durable.storage.sql.statement import Statement
from tests.simulation.sql import SCHEMA, parts, registry
from tests.simulation.sql.parts import IN, Side
from tests.simulation.sql.registry import Params
from tests.simulation.tables import Transaction

Bug = Callable[[ExitStack], None]
BUGS: Final[dict[str, Bug]] = {}


def bug(plant: Bug) -> Bug:
    BUGS[plant.__name__.replace("_", " ")] = plant
    return plant


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug while the block lasts."""
    with ExitStack() as stack:
        BUGS[name](stack)
        yield


def _statement(stack: ExitStack, statement: Statement, work: Any) -> None:
    """Let a statement do something else."""
    known = registry.statements()[str(statement.within(SCHEMA))]
    other = known._replace(work=work(known.work))
    changed: Mapping[str, Any] = {sql: other for sql, each in registry.statements().items() if each is known}
    stack.enter_context(patch.dict(registry._known, changed))


@bug
def the_fence_of_a_handled_message_is_ignored(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Attempts, "_complete", _complete_unfenced))


def _complete_unfenced(self: Any, tasks: Sequence[Any], session: Any, outbox: Outbox) -> None:
    """Finish what is there, and commit all the same."""
    owned = [task.lease for task in tasks]
    storage_inbox.finish_handled(session.connection(), self._schema, self._node, owned, keep_body=False)
    outbox.commit_allowed = True


@bug
def a_claim_does_not_raise_the_epoch(stack: ExitStack) -> None:
    def claim(tx: Transaction, side: Side, rows: Any, node: int) -> Any:
        changed = [parts.change(tx, side, row, owner_id=node) for row in rows]
        return [parts.claimed(row) for row in changed]

    for module in ("inbox", "outbox", "ordering"):
        stack.enter_context(patch(f"tests.simulation.sql.{module}.claim", claim))


@bug
def duplicates_are_stored_again(stack: ExitStack) -> None:
    def work(known: Any) -> Any:
        def store(tx: Transaction, p: Params) -> Any:
            for key in zip(p["id"], p["endpoint"], strict=True):
                for table in ("received_ids", "undated_ids"):
                    if tx.get(table, key) is not None:
                        tx.delete(table, key)
            return known(tx, p)

        return store

    _statement(stack, inbox.STORE_RECEIVED, work)


@bug
def rows_are_deleted_before_the_answer(stack: ExitStack) -> None:
    send = SendingAgent._send_timely

    async def send_timely(self: SendingAgent, batch: Any, ticket: int) -> None:
        self._deletions.add(batch)
        await send(self, batch, ticket)

    stack.enter_context(patch.object(SendingAgent, "_send_timely", send_timely))


@bug
def a_batch_is_answered_before_it_is_stored(stack: ExitStack) -> None:
    receive = ReceivingAgent.receive

    async def receive_early(self: ReceivingAgent, endpoint: str, batch: Any) -> Any:
        storing = asyncio.get_running_loop().create_task(receive(self, endpoint, batch), name="store later")
        storing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return [STORED for _ in batch]

    stack.enter_context(patch.object(ReceivingAgent, "receive", receive_early))


@bug
def dead_nodes_are_not_swept(stack: ExitStack) -> None:
    async def sweep(self: DormantNodes) -> int:
        return 0

    stack.enter_context(patch.object(DormantNodes, "sweep", sweep))


@bug
def a_stopping_node_keeps_its_rows(stack: ExitStack) -> None:
    async def release(self: Node, node_id: NodeId) -> bool:
        return True

    stack.enter_context(patch.object(Node, "_release_everything", release))


@bug
def forgotten_rows_are_not_released(stack: ExitStack) -> None:
    async def poll(self: Forgotten) -> int:
        return 0

    stack.enter_context(patch.object(Forgotten, "poll", poll))


@bug
def a_latch_stays_for_ever(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Latch, "ping_succeeded", lambda self: False))
    stack.enter_context(patch.object(Latch, "unlatch", lambda self: None))


@bug
def room_of_rolled_back_messages_is_not_given_back(stack: ExitStack) -> None:
    stack.enter_context(patch.object(SendingAgent, "abandon", lambda self, envelopes: None))


@bug
def messages_are_handed_over_before_the_commit(stack: ExitStack) -> None:
    store = Outbox._store

    def store_and_tell(self: Outbox, connection: Any, entries: Any, *, owned: bool) -> None:
        store(self, connection, entries, owned=owned)
        self._dispatcher.committed([entry.sent for entry in entries if entry.sent is not None])

    stack.enter_context(patch.object(Outbox, "_store", store_and_tell))
    stack.enter_context(patch.object(Outbox, "_hand_over", lambda self, sent: None))


@bug
def keys_are_claimed_without_their_turn(stack: ExitStack) -> None:
    """As SKIP LOCKED alone would: rows behind those of another node are taken."""
    stack.enter_context(patch("tests.simulation.sql.ordering._Keys.ends_before", lambda self, key: float("inf")))


@bug
def a_schedule_moves_on_without_its_message(stack: ExitStack) -> None:
    stack.enter_context(patch("durable.recovery.recurring_schedules._Turn._store", lambda self, *of, **how: None))


@bug
def a_dead_node_leaves_its_rows_with_their_epoch(stack: ExitStack) -> None:
    def released(tx: Transaction, p: Params) -> Any:
        rows = parts.unlocked(tx, IN, lambda row: row.owner_id == p["node"])
        for row in rows:
            tx.put("incoming", row.key, replace(row, owner_id=0))
        return [(len(rows),)]

    _statement(stack, recovery.INCOMING.release_dormant.whole, lambda _: released)


@bug
def a_statement_is_not_known(stack: ExitStack) -> None:
    """A task that runs one fails by itself, as with any error."""
    known = stack.enter_context(patch.dict(registry._known))
    del known[str(outbox.STORE_ONE_REMOTE.within(SCHEMA))]
