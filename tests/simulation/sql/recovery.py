"""The statements of durable.storage.sql.recovery, for both tables of work."""

from __future__ import annotations

from collections.abc import Callable

from durable.storage.sql import recovery as sql
from durable.storage.sql.recovery import Recovery
from durable.storage.sql.work import INBOX, OUTBOX
from tests.simulation.rows import Work
from tests.simulation.sql.parts import (
    CLAIMED,
    IN,
    OUT,
    Side,
    change,
    claim,
    finish,
    mine,
    remember_expired,
    unlocked,
)
from tests.simulation.sql.registry import Params, Rows, does
from tests.simulation.tables import Transaction


def _released(name: str, side: Side, *, is_death: bool = False) -> Callable[[Transaction, Params], Rows]:
    def release(tx: Transaction, p: Params) -> Rows:
        rows = unlocked(tx, side, lambda row: row.owner_id == p["node"])[: p.get("batch_size")]
        for row in rows:
            deaths = row.interruptions + (1 if is_death else 0)
            change(tx, side, row, owner_id=0, epoch=row.epoch + 1, interruptions=deaths)
        return [(len(rows),)]

    release.__name__ = f"{name}_{side.table}"
    return release


def _recovery(table: Recovery, side: Side) -> None:
    name = side.table
    does(table.release_dormant.whole, "count")(_released("release_dormant", side, is_death=True))
    does(table.release_former.whole, "count")(_released("release_former", side))
    does(table.release_all.whole, "count")(_released("release_all", side))

    def owners(tx: Transaction, p: Params) -> Rows:
        found = {row.owner_id for row in tx.all(name)}
        return [(owner,) for owner in sorted(found) if owner > 0]

    def owned_by(tx: Transaction, p: Params) -> Rows:
        return [(*row.key, row.epoch) for row in tx.all(name) if row.owner_id == p["node"]]

    def release(tx: Transaction, p: Params) -> int:
        rows = mine(tx, side, p)
        for row in rows:
            interruptions = row.interruptions + int(p["is_interrupted"])
            change(tx, side, row, owner_id=0, epoch=row.epoch + 1, interruptions=interruptions)
        return len(rows)

    def promote_due(tx: Transaction, p: Params) -> Rows:
        due: list[tuple[object, Work]] = [
            (row.execution_time, row)
            for row in unlocked(tx, side, lambda row: row.execution_time is not None and row.owner_id == 0)
            if row.execution_time is not None and row.execution_time <= tx.now
        ]
        chosen = sorted(due, key=lambda each: (each[0], each[1].seq))[: p["batch_size"]]
        for _, row in chosen:
            change(tx, side, row, execution_time=None)
        return [(len(chosen),)]

    def late(tx: Transaction, p: Params, *, buried: bool) -> list[Work]:
        def fits(row: Work) -> bool:
            if row.owner_id != 0 or row.deliver_by is None or row.deliver_by >= tx.now:
                return False
            return (p["buries_others"] != (row.message_type in p["excepted"])) is buried

        rows = unlocked(tx, side, fits)
        return sorted(rows, key=lambda row: (row.deliver_by, row.seq))[: p["batch_size"]]

    def expire(tx: Transaction, p: Params) -> Rows:
        rows = late(tx, p, buried=False)
        for row in rows:
            if side is IN:
                remember_expired(tx, row.key, row.deliver_by)
            finish(tx, side, row, "expired", p, (INBOX if side is IN else OUTBOX).late)
        return [(len(rows),)]

    def claim_late(tx: Transaction, p: Params) -> Rows:
        return claim(tx, side, late(tx, p, buried=True), p["node"])

    for work in (owners, owned_by, release, promote_due, expire, claim_late):
        work.__name__ = f"{work.__name__}_{name}"
    does(table.owners, "name")(owners)
    does(table.owned_by, "id address epoch")(owned_by)
    does(table.release)(release)
    does(table.promote_due.whole, "count")(promote_due)
    does(table.expire.whole, "count")(expire)
    does(table.claim_late.whole, CLAIMED)(claim_late)


_recovery(sql.OUTGOING, OUT)
_recovery(sql.INCOMING, IN)
