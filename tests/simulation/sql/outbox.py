"""The statements of durable.storage.sql.outbox."""

from __future__ import annotations

from uuid import UUID

from durable.storage.sql import outbox as sql
from tests.simulation.rows import Known, Work
from tests.simulation.sql.parts import (
    CLAIMED,
    IN,
    OUT,
    bury,
    by_seq,
    change,
    claim,
    finish,
    in_time,
    insert,
    is_free,
    is_open,
    mine,
    unlocked,
    work_rows,
)
from tests.simulation.sql.registry import Params, Rows, does
from tests.simulation.tables import Transaction


def remember_undated(tx: Transaction, row: Known) -> bool:
    """New is also what was given up, and is sent again at another time."""
    key = row.id, row.endpoint
    if insert(tx, "undated_ids", key, row):
        return True
    tx.lock("undated_ids", key)
    known = tx.get("undated_ids", key)
    if known is None or not known.given_up or known.sent_at == row.sent_at:
        return False
    tx.put("undated_ids", key, row)
    return True


def _known_of(tx: Transaction, p: Params) -> list[tuple[UUID, str]]:
    """Store what is new; return the keys of what is not."""
    addresses = [endpoint or p["destination"][i] for i, endpoint in enumerate(p["endpoint"])]
    known = []
    for i, values in enumerate(work_rows(p, addresses)):
        side = OUT if p["endpoint"][i] is None else IN
        is_new = True
        if side is IN:
            values["received_at"] = tx.clock
            if values["id"].version not in (7, 8):
                memory = Known(
                    id=values["id"],
                    endpoint=values["address"],
                    message_digest=p["message_digest"][i],
                    terms=0,
                    received_at=tx.now,
                    sent_at=values["sent_at"],
                )
                is_new = remember_undated(tx, memory)
        row = Work(seq=tx.store.next(side.table), **values)
        if not (is_new and insert(tx, side.table, row.key, row)):
            known.append(row.key)
    return known


@does(sql.STORE_SENT, "id address")
def store_sent(tx: Transaction, p: Params) -> Rows:
    return _known_of(tx, p)


@does(sql.STORE_ONE_REMOTE)
def store_one_remote(tx: Transaction, p: Params) -> int:
    return 1 - len(_known_of(tx, {name: [value] for name, value in p.items()} | {"endpoint": [None]}))


@does(sql.STORE_ONE_LOCAL)
def store_one_local(tx: Transaction, p: Params) -> int:
    return 1 - len(_known_of(tx, {name: [value] for name, value in p.items()}))


@does(sql.WAKE_NODES, "pg_notify")
def wake_nodes(tx: Transaction, p: Params) -> Rows:
    tx.notifies = True
    tx.payload = p["payload"]
    return [("",)]


@does(sql.CLAIM_OUTGOING.whole, CLAIMED)
def claim_outgoing(tx: Transaction, p: Params) -> Rows:
    chosen: list[Work] = []
    for destination, size, floor in zip(p["destinations"], p["sizes"], p["floors"], strict=True):
        if is_open(tx, "destination", destination):
            continue

        def fits(row: Work, destination: str = destination, floor: int = floor) -> bool:
            return row.address == destination and row.seq >= floor and is_free(row) and in_time(tx, row)

        chosen += sorted(unlocked(tx, OUT, fits), key=by_seq)[:size]
    return claim(tx, OUT, chosen[: p["batch_size"]], p["node"])


@does(sql.WAITED_FOR_OUTGOING, "destination")
def waited_for(tx: Transaction, p: Params) -> Rows:
    return [(name,) for name in sorted({row.address for row in tx.all("outgoing")} & set(p["destinations"]))]


@does(sql.DELETE_SENT, "count")
def delete_sent(tx: Transaction, p: Params) -> Rows:
    rows = mine(tx, OUT, p)
    for row in rows:
        finish(tx, OUT, row, "sent", p)
    return [(len(rows),)]


@does(sql.COUNT_FAILED_SEND)
def count_failed_send(tx: Transaction, p: Params) -> int:
    rows = mine(tx, OUT, p)
    for row in rows:
        change(tx, OUT, row, attempts=row.attempts + 1)
    return len(rows)


@does(sql.DEAD_LETTER_OUTGOING, "count")
def dead_letter_outgoing(tx: Transaction, p: Params) -> Rows:
    rows = mine(tx, OUT, p)
    for row in rows:
        bury(tx, OUT, row, p)
        finish(tx, OUT, row, "dead-lettered", p, p["reason"])
    return [(len(rows),)]


@does(sql.OWNED_OUTGOING, "id is_late")
def owned_outgoing(tx: Transaction, p: Params) -> Rows:
    return [(row.id, None if row.deliver_by is None else row.deliver_by < tx.clock) for row in mine(tx, OUT, p)]


@does(sql.EXPIRE_OWNED_OUTGOING, "id expired")
def expire_owned_outgoing(tx: Transaction, p: Params) -> Rows:
    rows = list(mine(tx, OUT, p))
    late = [row for row in rows if row.deliver_by is not None and row.deliver_by < tx.clock]
    for row in late:
        finish(tx, OUT, row, "expired", p, "expired before it was sent")
    expired = {row.id for row in late}
    return [*((row.id, True) for row in late), *((row.id, False) for row in rows if row.id not in expired)]
