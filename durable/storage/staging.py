"""Publishing in bulk: rows that many tasks have staged move into the outbox, or the inbox, in one transaction.

    task 1 ── COPY ──> staged_<job>_<attempt 1> ──┐
    task 2 ── COPY ──> staged_<job>_<attempt 2> ──┼── publish(): the batch's id, and all rows ──> outgoing_envelopes
       and again ────> staged_<job>_<attempt 3> ──┘                                               incoming_envelopes

Rows that come in an order (messages.ordering) are inserted by one statement, sorted by their positions, however many
tables they lie in, so that `seq` follows it. Others are moved table by table, in the order of their ids.

An attempt that dies takes its table with it, because it makes the table in the transaction of its COPY. The tables that
the caller names are moved; every other table of the job is dropped with them, and tables of dead jobs are dropped after
a day.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import IntegrityError

from durable.errors import InvalidMessage, StorageUnavailable
from durable.failpoints import failpoint
from durable.grammar import several
from durable.storage import replays
from durable.storage.database import channel
from durable.storage.locks import Job, try_lock
from durable.storage.sql import staging as statements
from durable.storage.sql.staging import UNTOLD
from durable.storage.sql.statement import Statement

LONGEST_JOB: Final = timedelta(days=1)
"""A job that has not published after this time has lost its rows, and must be run again."""


_WHY: Final = "they were readable then or are now, or were encrypted with a key that is not given"
_ADVICE: Final = (
    "give the key of before, too, and encrypt as before; if these are the same rows, they are published, and need "
    "nothing more: new keys would make them other messages"
)
_NOT_KEPT: Final = "what is not kept of messages that were sent or handled"


class Staged(NamedTuple):
    """Rows staged by one attempt. `local_rows` are those for the inbox, `ordered_rows` those that come in an order."""

    table: str
    rows: int
    local_rows: int
    ordered_rows: int = 0


class Batch(NamedTuple):
    """Identity of a batch: its name, and for a stream the number of the micro-batch."""

    name: str
    number: int | None = None
    contents: Mapping[str, str] | None = None
    """The fingerprint of its rows, by column. Other rows under the same name are refused."""
    plain: Mapping[str, str] | None = None
    """The same of bodies that were encrypted here, as if they were not: compared, and never stored."""
    others: Sequence[str] = ()
    """Other names under which it may have been published."""


class Published(NamedTuple):
    """Number of rows of a batch, and of the new ones among them."""

    batch: str
    rows: int
    added: int


class Remembered(NamedTuple):
    """Batch that was published last at `at`; `number` is that of the micro-batch where a stream publishes."""

    name: str
    rows: int
    added: int
    number: int | None
    at: datetime


def table_name(job: UUID, attempt: int) -> str:
    return f"{_prefix(job)}{attempt}"


def make_sql(schema: str) -> str:
    """The statement that makes a staging table of the name $1: for the connection that copies into it."""
    return statements.MAKE_STAGING.within(schema).text.replace(":staging", "$1")


def publish(
    conn: Connection, schema: str, job: UUID, batch: Batch, staged: Sequence[Staged], *, once: bool = False
) -> Published | None:
    """Move what these attempts have staged, under the batch's id, and drop the job's tables. Rows are unowned.

    `once`: for as long as duplicates are recognised, add nothing that was published before, even if it was sent since.
    None when the batch was published before: then nothing moves. Raises InvalidMessage when two messages have one id,
    here or with what is there, when the batch had other rows, or when a stream gives a number that is not its next one
    or its last one again; and StorageUnavailable when staged rows are gone.
    """
    if batch.others:
        names = {"batches": [batch.name, *batch.others]}
        batch = batch._replace(name=conn.execute(statements.FIND_NAME.within(schema), names).scalar() or batch.name)
    contents = batch.contents and json.dumps(batch.contents)
    params = {"batch": batch.name, "job": job, "number": batch.number, "contents": contents}
    begun = conn.execute(statements.BEGIN_BATCH.within(schema), params).first()
    published = None
    if begun is not None:
        added = _move(conn, schema, staged, once=once)
        published = Published(batch.name, sum(each.rows for each in staged), added)
        _record(conn, schema, published)
    else:
        _refuse_other_contents(conn, schema, batch, [each.table for each in staged if each.rows])
    drop(conn, schema, job)
    failpoint("P1")
    return published


def publish_part(conn: Connection, schema: str, staged: Staged, *, once: bool = False) -> int:
    """Move what one attempt has staged, by itself, and drop its table; returns how many rows were new.

    Raises as publish() does.
    """
    added = _move(conn, schema, [staged], once=once)
    conn.execute(statements.DROP_STAGING.within(schema), {"chosen": staged.table, "keep": -LONGEST_JOB})
    failpoint("P1")
    return added


def parts_published(
    conn: Connection, schema: str, job: UUID, published: Published, *, contents: Mapping[str, str] | None = None
) -> None:
    """All parts were published: remember the batch with its contents, and wake the nodes."""
    params = {"batch": published.batch, "job": job, "number": None, "contents": contents and json.dumps(contents)}
    if conn.execute(statements.BEGIN_BATCH.within(schema), params).first() is None:
        wake(conn, schema)
    else:
        _record(conn, schema, published)
    drop(conn, schema, job)


def _record(conn: Connection, schema: str, published: Published) -> None:
    counts = {"batch": published.batch, "row_count": published.rows, "added_count": published.added}
    conn.execute(statements.COUNT_BATCH.within(schema), counts)
    wake(conn, schema)


def _move(conn: Connection, schema: str, staged: Sequence[Staged], *, once: bool) -> int:
    """Move staged rows. Returns the number of new rows."""
    staged = [each for each in staged if each.rows]
    for each in staged:
        found = int(conn.execute(_over(statements.COUNT_STAGED, schema, each.table)).scalar_one())
        if found != each.rows:
            raise StorageUnavailable(
                f"{each.rows - found} of {each.rows} staged rows are gone: the server was restarted meanwhile; "
                "nothing was published, publish it again"
            )
    added = sum(_move_together(conn, schema, tables, once=once) for tables in _in_turns(staged))
    if added < sum(each.rows for each in staged):
        _refuse_ambiguous(conn, schema, [each.table for each in staged])
        _refuse_changed(conn, schema, [each.table for each in staged])
    return added


def _in_turns(staged: Sequence[Staged]) -> list[Sequence[Staged]]:
    """Group the rows that are moved at once: all, as soon as rows of one order may lie in several tables."""
    return [staged] if any(each.ordered_rows for each in staged) else [[each] for each in staged]


def _move_together(conn: Connection, schema: str, staged: Sequence[Staged], *, once: bool) -> int:
    tables, added = [each.table for each in staged], 0
    if any(each.local_rows < each.rows for each in staged):
        added += (_move_remote_once if once else _move_remote)(conn, schema, tables)
    if any(each.local_rows for each in staged):
        move_local = statements.MOVE_LOCAL_ONCE if once else statements.MOVE_LOCAL
        added += conn.execute(_over(move_local, schema, *tables)).rowcount
    return added


def _move_remote(conn: Connection, schema: str, tables: Sequence[str]) -> int:
    """Move rows as if none was there already; if one was, move them once more with care."""
    try:
        with conn.begin_nested():
            return conn.execute(_over(statements.MOVE_REMOTE_NEW, schema, *tables)).rowcount
    except IntegrityError:
        return conn.execute(_over(statements.MOVE_REMOTE, schema, *tables)).rowcount


def _move_remote_once(conn: Connection, schema: str, tables: Sequence[str]) -> int:
    return conn.execute(_over(statements.MOVE_REMOTE_ONCE, schema, *tables)).rowcount


def find(conn: Connection, schema: str, job: UUID) -> Published | None:
    """Read what this job has published; None when another job did."""
    row = conn.execute(statements.READ_BATCH.within(schema), {"job": job}).first()
    return None if row is None else Published(*row)


def newest(conn: Connection, schema: str, limit: int) -> list[Remembered]:
    """The batches that were published last."""
    return [Remembered(*row) for row in conn.execute(statements.READ_BATCHES.within(schema), {"limit": limit})]


def wake(conn: Connection, schema: str) -> None:
    """Tell the nodes at COMMIT that there is work without an owner."""
    conn.execute(statements.NOTIFY.within(schema), {"channel": channel(schema)})


def drop(conn: Connection, schema: str, job: UUID) -> None:
    """Every staging table of this job."""
    conn.execute(statements.DROP_STAGING.within(schema), {"chosen": _prefix(job), "keep": -LONGEST_JOB})


def sweep(conn: Connection, schema: str, *, keep_batches: timedelta) -> list[str]:
    """Drop the tables of jobs that died, and forget old batches and replays. Returns the names of the tables."""
    if not try_lock(conn, schema, Job.PARTITIONS):
        return []
    conn.execute(statements.PURGE_BATCHES.within(schema), {"keep": keep_batches})
    replays.purge(conn, schema, keep=keep_batches)
    dropped = conn.execute(statements.DROP_STAGING.within(schema), {"chosen": "staged_", "keep": LONGEST_JOB})
    return list(dropped.scalars())


def _refuse_ambiguous(conn: Connection, schema: str, tables: Sequence[str]) -> None:
    """Some rows were not new: because they were there before, or because there are two of one id here?"""
    ambiguous = conn.execute(_over(statements.FIND_AMBIGUOUS, schema, *tables)).first()
    if ambiguous is not None:
        raise InvalidMessage(
            f"two rows of type {ambiguous.message_type} have the id {ambiguous.id} and differ in "
            f"{', '.join(ambiguous.columns)}: choose a key that is another for each message"
        )


def _refuse_changed(
    conn: Connection, schema: str, tables: Sequence[str], not_kept: str = _NOT_KEPT, *, is_told: bool = False
) -> None:
    """Refuse changed messages: rows that were not new must equal those that are there, or a correction would be
    dropped without a word. `not_kept`: the name of what differs, where the values of before are gone. `is_told`: the
    caller knows that something differs, and says so where rows cannot tell.
    """
    changed = conn.execute(_over(statements.FIND_CHANGED, schema, *tables)).all()
    if any(each.columns is None for each in changed):
        changed = [each for each in changed if each.columns is not None]
        changed += conn.execute(_over(statements.NAME_CHANGED, schema, *tables)).all()
    if changed and all(each.columns and _is_untold(each.columns) for each in changed):
        if is_told:
            return
        raise InvalidMessage(
            f"bodies of {several(sum(each.rows for each in changed), 'rows')} cannot be compared with those published "
            f"before under the same ids, such as {min(each.id for each in changed)}, because {_WHY}; "
            f"nothing was published: {_ADVICE}"
        )
    if changed:
        counts: Counter[str] = Counter()
        for each in changed:
            counts.update(dict.fromkeys(each.columns or [not_kept], each.rows))
        columns = ", ".join(f"{column} ({count:,})" for column, count in counts.items())
        raise InvalidMessage(
            f"{several(sum(each.rows for each in changed), 'rows', 'were')} published before, under the same ids, and "
            f"differ in {columns}, such as {min(each.id for each in changed)}; nothing was published: "
            "give corrections keys of their own, such as with a revision"
        )


def _refuse_other_contents(conn: Connection, schema: str, batch: Batch, tables: Sequence[str]) -> None:
    """Refuse other rows under the name of a batch; those that still wait are counted."""
    number, known = conn.execute(statements.READ_CONTENTS.within(schema), {"batch": batch.name}).one()
    if number is not None or batch.number is not None:
        _refuse_other_number(batch, number, known)
        return
    if known is None or batch.contents is None or not (differing := _differing(known, batch)):
        return
    if tables:
        of_same_ids = [] if {"rows", "id"} & set(differing) else differing
        _refuse_changed(conn, schema, tables, ", ".join(of_same_ids) or _NOT_KEPT, is_told=not _is_untold(differing))
    raise InvalidMessage(
        f"batch {batch.name!r} was published before, {_difference(known, batch)}; nothing was published: "
        + (_ADVICE if _is_untold(differing) else "publish the same rows, or give others a name and keys of their own")
    )


def _refuse_other_number(batch: Batch, number: int | None, known: Mapping[str, str] | None) -> None:
    """Refuse a micro-batch, unless it is the last one again: that is what a restart repeats, and no other."""
    if number is None or batch.number is None:
        before, now = ("a streaming query", "a batch") if batch.number is None else ("a batch", "a streaming query")
        raise InvalidMessage(
            f"batch {batch.name!r} was published before, by {before}, and is now that of {now}; nothing was "
            "published: give it another name"
        )
    if number == batch.number and known is not None and batch.contents is not None:
        if not (differing := _differing(known, batch)):
            return
        difference = _difference(known, batch)
        if _is_untold(differing):
            raise InvalidMessage(
                f"micro-batch {batch.number} of {batch.name!r} was published before, {difference}; nothing was "
                f"published: {_ADVICE}"
            )
    else:
        difference = f"and so was number {number}, the last one"
    raise InvalidMessage(
        f"micro-batch {batch.number} of {batch.name!r} was published before, {difference}; nothing was published, and "
        "its rows are still to come: the checkpoint was put back, has lost files or is used by two queries, or the "
        "query makes other rows each time, as one of dead_letters does after a letter was resolved; start the query "
        "with a new checkpoint: rows that still wait are recognised"
    )


def _difference(known: Mapping[str, str], batch: Batch) -> str:
    """Name the columns; which rows were sent since is not kept."""
    given, differing = batch.contents or {}, _differing(known, batch)
    if "rows" in differing:
        return f"with other rows ({known['rows']}, and now {given['rows']})"
    if "id" in differing:
        return "with other rows"
    if _is_untold(differing):
        return f"and its bodies cannot be compared, because {_WHY}"
    columns = ", ".join(name for name in differing if name != "whole")
    return f"with other values in {columns}" if columns else "with the same values in other rows"


def _differing(known: Mapping[str, str], batch: Batch) -> list[str]:
    """The columns with other values; empty for the same rows. Two batches without rows are the same."""
    given = batch.contents or {}
    if known["rows"] != given["rows"]:
        return ["rows"]
    if given["rows"] == "0":
        return []
    names = [name for name in given if name.partition(" ")[0] not in ("sealed", "body", "whole")]
    differing = [name for name in names if known.get(name) != given[name]]
    pairs = _views(known, batch)
    if any(then == now for then, now in pairs):
        return differing
    if not pairs:
        return [*differing, UNTOLD]
    column = "whole" if any(then[0] == now[0] for then, now in pairs) else "body"
    return [*differing, column]


def _views(known: Mapping[str, str], batch: Batch) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """The body and the whole of then and of now, in each way in which they can be compared."""
    given = batch.contents or {}
    own = _view(known, ""), _view(given, "")
    marks = [name.removeprefix("body") for name in given if name.startswith("body ") and name in known]
    of_as_many = known["sealed"] == given["sealed"]
    pairs = [(_view(known, mark), _view(given, mark)) for mark in marks if of_as_many]
    if (of_as_many and known["sealed"] == "0") or own[0] == own[1]:
        pairs.append(own)
    elif known["sealed"] == "0" and batch.plain is not None:
        pairs.append((own[0], _view(batch.plain, "")))
    return pairs


def _view(contents: Mapping[str, str], mark: str) -> tuple[str, str]:
    return contents[f"body{mark}"], contents[f"whole{mark}"]


def _is_untold(differing: Sequence[str]) -> bool:
    """True when nothing is known to differ."""
    return set(differing) == {UNTOLD}


def _over(statement: Statement, schema: str, *tables: str) -> TextClause:
    union = " UNION ALL ".join(f'SELECT * FROM "{schema}".{table}' for table in tables)
    return text(statement.within(schema).text.replace("{staged}", f"({union}) AS staged"))


def _prefix(job: UUID) -> str:
    return f"staged_{job.hex}_"
