"""Dead letters in two forms: plain values for JSON, and text made from those values."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from durable.cli.output import Block, Columns, Table, counted, done_of, one_line, utc
from durable.dead_letters import bodies as letter_bodies
from durable.dead_letters.bulk import Run
from durable.dead_letters.rehearsal import Rehearsed
from durable.envelope import Envelope
from durable.grammar import several
from durable.listed import Listed
from durable.storage.dead_letters import Attempt, DeadLetter, Group, Relative, Summary
from durable.storage.rows import both_ends, error_text

Row = dict[str, Any]
_SHORT = 100
_MOST_ROWS = 100
_MOST_PARKED = 5


def group_rows(groups: Sequence[Group]) -> list[Row]:
    return [asdict(group) for group in groups]


def summary_rows(letters: Sequence[Summary]) -> list[Row]:
    return [letter._asdict() for letter in letters]


def letter_row(letter: DeadLetter) -> Row:
    """Write a whole letter; bodies as text where possible."""
    kind = letter.content_type, letter.summary.message_type
    return {
        **letter.summary._asdict(),
        "correlation_id": letter.correlation_id,
        "causation_id": letter.causation_id,
        "partition_key": letter.partition_key,
        "content_type": letter.content_type,
        "headers": letter.headers,
        "sent_at": letter.sent_at,
        "deliver_by": letter.deliver_by,
        "traceback": letter.traceback,
        **letter_bodies.row("body", letter.body, *kind),
        **(letter_bodies.row("edited_body", letter.edited_body, *kind) if letter.edited_body is not None else {}),
    }


def attempt_rows(attempts: Sequence[Attempt]) -> list[Row]:
    return [attempt._asdict() for attempt in attempts]


def relative_rows(relatives: Sequence[Relative]) -> list[Row]:
    return [relative._asdict() for relative in relatives]


def rehearsed_row(rehearsed: Rehearsed) -> Row:
    summary, error = rehearsed.letter.summary, rehearsed.error
    return {
        "letter_id": summary.letter_id,
        "id": summary.id,
        "message_type": summary.message_type,
        "address": summary.address,
        "outcome": rehearsed.outcome,
        "sends": [_sent_row(envelope) for envelope in rehearsed.sends],
        "does": list(rehearsed.does),
        "error": None if error is None else error_row(error),
    }


def error_row(error: BaseException) -> Row:
    kind, message, text = error_text(error)
    return {"type": kind, "message": message, "traceback": text}


def _sent_row(envelope: Envelope) -> Row:
    return {
        "message_type": envelope.message_type,
        "destination": envelope.destination,
        "execution_time": envelope.execution_time,
        **letter_bodies.row("body", envelope.body, envelope.content_type, envelope.message_type),
    }


# ---------------------------------------------------------------- as text


def groups(listed: Listed[Row]) -> list[Block]:
    columns: Columns = {
        "fingerprint": "fingerprint",
        "side": "side",
        "message type": "message_type",
        "exception": "exception_type",
        "count": "count",
        "first": "first",
        "last": "last",
        "example": lambda row: _short(row["example"]),
    }
    return [Table.of("dead letters by cause", listed, columns)] if listed.rows else ["no dead letters"]


def summaries(rows: Sequence[Row], following: int | None) -> list[Block]:
    columns: Columns = {
        "letter": "letter_id",
        "failed": "failed_at",
        "side": "side",
        "message type": "message_type",
        "attempts": "attempts",
        "replays": "replay_count",
        "exception": "exception_type",
        "reason": lambda row: _short(row["reason"]),
        "state": lambda row: row["resolution"] or ("" if row["replayable"] else "only bytes"),
    }
    table: list[Block] = [Table.of("dead letters, the newest first", rows, columns) if rows else "no dead letters"]
    return [*table, "", f"more letters: --before {following}"] if following is not None else table


def letter(row: Row, attempts: Sequence[Row], relatives: Sequence[Row]) -> list[Block]:
    """Show one letter: its envelope, its bodies, and each failed attempt."""
    facts = {
        "id": row["id"],
        "sent": f"{utc(row['sent_at'])} by {row['source']}" if row["sent_at"] else None,
        "conversation": row["correlation_id"],
        "caused by": row["causation_id"],
        "key": row["partition_key"],
        "headers": ", ".join(f"{name}={value}" for name, value in row["headers"].items()) or None,
        "deliver by": row["deliver_by"] and utc(row["deliver_by"]),
        "failed": f"{utc(row['failed_at'])} on node {row['node_id']}",
        "attempts": f"{row['attempts']}{_deaths(row['interruptions'])}",
        "replays": row["replay_count"],
        "fingerprint": row["fingerprint"],
        "error": f"{row['exception_type']}: {row['reason']}",
        "can be replayed": "yes" if row["replayable"] else "no, only its bytes were kept",
        "resolved": _resolution(row),
    }
    side = "incoming at" if row["side"] == "incoming" else "outgoing to"
    blocks: list[Block] = [
        f"letter {row['letter_id']}: {row['message_type'] or 'no envelope'}, {side} {row['address']}",
        *(f"  {name:<16} {one_line(value)}" for name, value in facts.items() if value is not None),
        *_body_lines("body", row),
        *_body_lines("edited_body", row),
    ]
    for attempt in attempts:
        title = f"attempt {attempt['number']}, {utc(attempt['failed_at'])} on node {attempt['node_id']}"
        blocks += ["", f"{title}: {one_line(attempt['exception_type'])}", _indented(attempt["traceback"])]
    if not attempts and row["traceback"]:
        blocks += ["", "traceback", _indented(row["traceback"])]
    return blocks + _relatives(relatives)


def told(run: Run, verb: str) -> list[Block]:
    """Say how far a run came, and why letters were left."""
    done = f"{verb} {done_of(run.done, run.total, 'letter')}"
    lines: list[Block] = [f"stopped: {done}; run the same command again for the rest" if run.stopped else done]
    return lines + ([f"left: {left(run)}"] if run.waiting or run.taken or run.refused or run.unfit else [])


def parked(rows: Sequence[Row]) -> list[Block]:
    """Say what is parked by dead letters, and how to resume it."""
    lines: list[Block] = [
        f"{row['kind']} {row['key']} is parked"
        + ("" if row["waiting"] is None else f", and {several(row['waiting'], 'messages', 'wait')} behind it")
        + f"; run: durable-agent resume APP:BUS --{row['kind']} {shlex.quote(row['key'])}"
        for row in rows[:_MOST_PARKED]
    ]
    more = len(rows) - _MOST_PARKED
    return [*lines, f"{more:,} more are parked: see durable-agent circuits"] if more > 0 else lines


def left(run: Run) -> str:
    """Count the letters that were left, by reason."""
    reasons = {
        "the message is already waiting": run.waiting,
        "another message, or a repetition of this one, has used its id; show it, and discard it": run.taken,
        "the database refuses to change it, for the reason in the log": run.refused,
        "no whole envelope, only bytes; show it, and discard it": run.unfit,
    }
    counted = [f"{count:,} ({reason})" for reason, count in reasons.items() if count]
    return ", ".join(counted) or "another operator has resolved it"


def rehearsal(rows: Sequence[Row]) -> list[Block]:
    """Show the outcomes of a rehearsal; long lists are cut, because JSON holds them whole."""
    counts = ", ".join(
        f"{sum(row['outcome'] == outcome for row in rows)} {would}"
        for outcome, would in (("succeeds", "would succeed"), ("fails", "would fail"), ("is sent", "would be sent"))
        if any(row["outcome"] == outcome for row in rows)
    )
    failed = [row for row in rows if row["error"]]
    blocks: list[Block] = [
        f"rehearsed {counted(len(rows), 'letter')} and rolled back: {counts}" if rows else "rehearsed no letter"
    ]
    if failed:
        cells = [
            (row["letter_id"], row["message_type"], row["error"]["type"], _short(row["error"]["message"]))
            for row in failed
        ]
        blocks += _cut("would fail", ("letter", "message type", "exception", "message"), cells)
    return [*blocks, *sends(rows, "would be sent by the handlers"), *does(rows)]


def sends(rows: Sequence[Row], title: str) -> list[Block]:
    cells = [
        (row["letter_id"], each["message_type"], each["destination"], _short(_shown(each, is_kept=False)))
        for row in rows
        for each in row["sends"]
    ]
    return _cut(title, ("letter", "message type", "destination", "body"), cells) if cells else []


def does(rows: Sequence[Row]) -> list[Block]:
    """Show the changes that handlers ask for: of circuits, schedules and delayed messages."""
    cells = [(row["letter_id"], row["message_type"], each) for row in rows for each in row["does"]]
    return _cut("changes by the handlers", ("letter", "message type", "change"), cells) if cells else []


def _cut(title: str, columns: Sequence[str], cells: Sequence[Any]) -> list[Block]:
    blocks: list[Block] = [Table(title, columns, cells[:_MOST_ROWS])]
    if len(cells) > _MOST_ROWS:
        blocks.append(f"  {len(cells) - _MOST_ROWS:,} more; --json shows all")
    return blocks


def _relatives(rows: Sequence[Row]) -> list[Block]:
    columns = {
        "where": "place",
        "letter": "letter_id",
        "message type": "message_type",
        "at": "address",
        "sent": "sent_at",
        "state": "state",
        "id": "id",
        "caused by": "causation_id",
    }
    return [Table.of("same conversation", rows, columns)] if rows else []


def _resolution(row: Row) -> str | None:
    if row["resolution"] is None:
        return None
    why = f": {row['resolution_reason']}" if row["resolution_reason"] else ""
    return f"{row['resolution']} {utc(row['resolved_at'])} by {row['resolved_by']}{why}"


def _deaths(interruptions: int) -> str:
    return f", and {interruptions} of its nodes died" if interruptions else ""


def _body_lines(name: str, row: Row) -> list[Block]:
    if name not in row:
        return []
    return ["", name.replace("_", " "), f"  {both_ends(_shown(row, name), 4_000)}"]


def _shown(row: Row, name: str = "body", *, is_kept: bool = True) -> str:
    if (key_id := row.get(f"{name}_key")) is not None:
        return f"(encrypted with key {key_id}{'; show --decrypt opens it' if is_kept else ''})"
    return str(row[name]) if row[name] is not None else f"base64 {row[f'{name}_base64']}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}\N{HORIZONTAL ELLIPSIS}"
