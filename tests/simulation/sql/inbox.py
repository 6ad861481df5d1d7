"""The statements of durable.storage.sql.inbox, and of parked messages."""

from __future__ import annotations

from msgspec.structs import replace

from durable.storage.sql import inbox as sql
from durable.storage.sql import parked
from tests.simulation.rows import Attempt, Known, Letter, Work
from tests.simulation.sql.outbox import remember_undated
from tests.simulation.sql.parts import (
    CLAIMED,
    IN,
    bury,
    by_seq,
    change,
    claim,
    finish,
    in_time,
    insert,
    is_free,
    is_open,
    known_digest,
    mine,
    remember_expired,
    this,
    unlocked,
    work_rows,
)
from tests.simulation.sql.registry import Params, Rows, does
from tests.simulation.tables import Transaction


@does(sql.FINISH_MADE_UP)
def finish_made_up(tx: Transaction, p: Params) -> Rows:
    """It is undone: there is always room."""
    return []


@does(sql.STORE_RECEIVED, "id endpoint")
def store_received(tx: Transaction, p: Params) -> Rows:
    stored = []
    rows = work_rows(p, p["endpoint"])
    fresh = []
    for i, values in enumerate(rows):
        memory = Known(
            id=values["id"],
            endpoint=values["address"],
            message_digest=p["message_digest"][i],
            terms=p["terms"][i],
            received_at=tx.now,
            sent_at=values["sent_at"],
            due_at=p["execution_time"][i],
        )
        key = memory.id, memory.endpoint
        if memory.id.version == 7:
            fresh.append(insert(tx, "received_ids", key, replace(memory, sent_at=None)))
        else:
            fresh.append(remember_undated(tx, memory))
    for values, is_fresh in zip(rows, fresh, strict=True):
        if is_fresh:
            row = Work(seq=tx.store.next("incoming"), received_at=tx.clock, **values)
            if insert(tx, "incoming", row.key, row):
                stored.append(row.key)
    return stored


@does(sql.FIND_KNOWN, "id endpoint message_digest terms due_at expired deliver_by now")
def find_known(tx: Transaction, p: Params) -> Rows:
    found = []
    for key in zip(p["id"], p["endpoint"], strict=True):
        for table in ("received_ids", "undated_ids"):
            if (row := tx.get(table, key)) is not None:
                waiting = tx.get("incoming", key)
                deliver_by = None if waiting is None else waiting.deliver_by
                found.append((*key, row.message_digest, row.terms, row.due_at, row.expired, deliver_by, tx.clock))
    return found


@does(sql.NOTE_EXPIRED, "count")
def note_expired(tx: Transaction, p: Params) -> Rows:
    for id_, endpoint, deliver_by in zip(p["id"], p["endpoint"], p["deliver_by"], strict=True):
        remember_expired(tx, (id_, endpoint), deliver_by)
    return [(len(p["id"]),)]


@does(sql.LIVE_LONGER)
def live_longer(tx: Transaction, p: Params) -> int:
    later = dict(zip(zip(p["id"], p["endpoint"], strict=True), p["deliver_by"], strict=True))
    rows = [row for row in tx.all(IN.table) if row.key in later and row.deliver_by is not None]
    for row in rows:
        until = later[row.key]
        change(tx, IN, row, deliver_by=None if until is None else max(row.deliver_by, until))
    return len(rows)


@does(sql.QUARANTINE)
def quarantine(tx: Transaction, p: Params) -> int:
    same = {name: p[name] for name in ("id", "address", "body", "reason", "message_type", "partition_key")}
    letters = [{name: getattr(row, name) for name in same} for row in tx.all("letters")]  # none is ever resolved
    if p["id"] is not None and same in letters:
        return 0
    number = tx.store.next("letters")
    letter = Letter(
        letter_id=number,
        side="incoming",
        address=p["address"],
        id=p["id"],
        message_type=p["message_type"],
        partition_key=p["partition_key"],
        attempts=0,
        interruptions=0,
        exception_type=p["exception_type"],
        reason=p["reason"],
        node_id=p["node"],
        message_digest=p["message_digest"],
        replayable=p["replayable"],
        epoch=0,
        replay_count=0,
        ordering_key=p["ordering_key"],
        fair_key=p["fair_key"],
        body=p["body"],
    )
    tx.put("letters", number, letter)
    return 1


@does(sql.CLAIM_INCOMING.whole, CLAIMED)
def claim_incoming(tx: Transaction, p: Params) -> Rows:
    name = p["message_type"]
    if is_open(tx, "handler", name, p["handler"], is_trial=p["is_trial"]):
        return []
    floor = p["floor"]
    rows = unlocked(
        tx, IN, lambda row: row.message_type == name and row.seq >= floor and is_free(row) and in_time(tx, row)
    )
    return claim(tx, IN, sorted(rows, key=by_seq)[: p["batch_size"]], p["node"])


@does(sql.FINISH_HANDLED, "count")
def finish_handled(tx: Transaction, p: Params) -> Rows:
    rows = mine(tx, IN, p)
    for row in rows:
        finish(tx, IN, row, "handled", p)
    return [(len(rows),)]


@does(sql.BEGIN_SUSPECT_ATTEMPT, "attempts")
def begin_suspect_attempt(tx: Transaction, p: Params) -> Rows:
    row = this(tx, p)
    return [] if row is None else [(change(tx, IN, row, attempts=row.attempts + 1).attempts,)]


@does(sql.TAKE_BACK_ATTEMPT, "id")
def take_back_attempt(tx: Transaction, p: Params) -> Rows:
    row = this(tx, p)
    if row is None:
        return []
    change(tx, IN, row, owner_id=0, epoch=row.epoch + 1, attempts=row.attempts - 1)
    return [(row.id,)]


def _failures(tx: Transaction, row: Work, p: Params, letter_id: int | None) -> None:
    columns = p["failed_number"], p["failed_type"], p["failed_reason"]
    for number, kind, reason in sorted(zip(*columns, strict=True)):
        attempt = Attempt(
            attempt_id=tx.store.next("attempts"),
            id=row.id,
            endpoint=row.address,
            number=number,
            exception_type=kind,
            reason=reason,
            node_id=p["node"],
            letter_id=letter_id,
        )
        tx.put("failed_attempts", attempt.attempt_id, attempt)


def _earlier(tx: Transaction, row: Work) -> list[Attempt]:
    """The kept failures of a message, the last first."""
    kept = [
        each for each in tx.all("failed_attempts") if (each.id, each.endpoint) == row.key and each.letter_id is None
    ]
    return sorted(kept, key=lambda each: -each.attempt_id)


def _keep(tx: Transaction, row: Work, p: Params) -> Rows:
    for each in _earlier(tx, row)[p["earlier"] :]:
        tx.delete("failed_attempts", each.attempt_id)
    _failures(tx, row, p, None)
    return [(row.id,)]


@does(sql.RETRY_LATER, "id")
def retry_later(tx: Transaction, p: Params) -> Rows:
    row = this(tx, p)
    if row is None:
        return []
    attempts, due = row.attempts + p["counted"], tx.now + p["delay"]
    change(tx, IN, row, owner_id=0, epoch=row.epoch + 1, attempts=attempts, execution_time=due)
    return _keep(tx, row, p)


@does(sql.PUT_BACK, "id")
def put_back(tx: Transaction, p: Params) -> Rows:
    row = this(tx, p)
    if row is None:
        return []
    changed = {name: p[name] for name in ("headers", "fair_key", "body")}
    counted, seq = row.attempts + p["counted"], tx.store.next("incoming")
    change(tx, IN, row, owner_id=0, epoch=row.epoch + 1, attempts=counted, seq=seq, **changed)
    return _keep(tx, row, p)


@does(sql.DEAD_LETTER_INCOMING, "count")
def dead_letter_incoming(tx: Transaction, p: Params) -> Rows:
    row = this(tx, p)
    if row is None:
        return [(0,)]
    digest = known_digest(tx, row)
    digest = p["message_digest"] if digest is None else digest
    earlier = _earlier(tx, row)
    number = bury(tx, IN, row, p, counted=p["counted"], digest=digest)
    for each in earlier:
        tx.put("failed_attempts", each.attempt_id, replace(each, letter_id=number))
    _failures(tx, row, p, number)
    finish(tx, IN, row, "dead-lettered", p, p["reason"])
    return [(1,)]


@does(sql.LATE_INCOMING, "deliver_by")
def late_incoming(tx: Transaction, p: Params) -> Rows:
    row = this(tx, p)
    is_late = row is not None and row.deliver_by is not None and row.deliver_by < tx.clock + p["within"]
    return [(row.deliver_by,)] if row is not None and is_late else []


@does(sql.EXPIRE_OWNED_INCOMING, "count")
def expire_owned_incoming(tx: Transaction, p: Params) -> Rows:
    found: Work | None = tx.get("incoming", (p["id"], p["endpoint"]))
    is_late = found is not None and found.deliver_by is not None and found.deliver_by < tx.clock + p["within"]
    row = this(tx, p) if is_late else None  # one that is not late is not waited for
    if row is None:
        return [(0,)]
    remember_expired(tx, row.key, row.deliver_by)
    finish(tx, IN, row, "expired", p, p["reason"])
    return [(1,)]


@does(parked.RELEASE_PARKED.whole, "count")
def release_parked(tx: Transaction, p: Params) -> Rows:
    """No body is encrypted here: what was parked by hand goes on when it expires."""
    rows = unlocked(tx, IN, lambda row: row.owner_id == parked.PARKED_OWNER and not in_time(tx, row))
    for row in sorted(rows, key=by_seq)[: p["batch_size"]]:
        change(tx, IN, row, owner_id=0, epoch=row.epoch + 1)
    return [(len(rows[: p["batch_size"]]),)]
