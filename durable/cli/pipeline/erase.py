"""pipeline erase: the content of messages goes from history, dead letters and the lake, and a record of it stays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from durable.cli.arguments import parse_id
from durable.cli.command import taking
from durable.cli.output import Block, Columns, Table, emit, is_json, print_blocks
from durable.cli.pipeline.options import Place, load_place
from durable.cli.runs import actor_name
from durable.errors import InvalidSetting
from durable.pipeline import erasing
from durable.pipeline.erasing import Listed, Survey
from durable.pipeline.erasures import State
from durable.pipeline.origin import Origin
from durable.pipeline.session import needs_spark
from durable.storage.erasures import Chosen, Erasure

Ids = Annotated[list[str] | None, typer.Option("--id", metavar="UUID", help="message of this id; may be repeated")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="all messages of this partition key; may be repeated"),
]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="reason for the record, which stays; write no names of people")
]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="actor for the record; default: USER@HOST")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="count them, and change nothing")]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]
Vacuum = Annotated[
    bool,
    typer.Option(
        "--vacuum",
        help="remove replaced files and old logs of the lake at once: readers of its older versions fail, and none of "
        "them can be read again",
    ),
]


@taking(place=load_place)
def erase(
    place: Place,
    reason: Reason,
    ids: Ids = None,
    keys: Keys = None,
    by: By = None,
    vacuum: Vacuum = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Erase keys, headers, bodies and error texts of messages, in the database and in the lake, for good.

    Rows stay with ids, types, addresses and times, so that audits find every message. Open letters are discarded. Ends
    with 1 while some of the messages still wait: erase once more when they have been handled or cancelled.
    """
    chosen = _chosen(ids or [], keys or [])
    _refuse_reason(reason, chosen)
    lake = place.lake
    if vacuum and lake is None:
        raise InvalidSetting("--vacuum: there is no lake; give --lake")
    with needs_spark():
        import deltalake  # noqa: F401
    origin = place.find_origin()
    there = erasing.survey(origin, lake, chosen)
    if there.is_empty and not there.here.waiting and not dry_run:
        known = erasing.earlier(origin, lake, chosen)
        if not known:
            raise InvalidSetting("erase: no message of these ids or keys is here; nothing was erased")
        if all(each.state is State.DONE for each in known) and not vacuum:
            emit(_document(origin, there, known[-1].erasure, None), *erasure_table(known))
            return
    if not dry_run and not yes:
        _confirm(there)
    done = None if dry_run else erasing.erase(origin, lake, chosen, actor=by or actor_name(), reason=reason)
    removed = erasing.scrub(origin, lake) if vacuum and lake is not None and not dry_run else None
    emit(_document(origin, there, done, removed), *_blocks(there, done, removed))
    if there.here.waiting:
        raise typer.Exit(1)


def erasure_rows(found: Sequence[Listed]) -> list[dict[str, Any]]:
    """Return the erasures as status and verify show them in JSON."""
    return [_record(each.erasure) | {"state": each.state.value} for each in found]


def erasure_table(found: Sequence[Listed]) -> list[Block]:
    """The same as a table, with what to do where one is not done; nothing where there is none."""
    if not found:
        return []
    columns: Columns = {
        "erasure": lambda each: each.erasure.erasure_id,
        "begun": lambda each: each.erasure.began_at,
        "by": lambda each: each.erasure.actor,
        "reason": lambda each: each.erasure.reason,
        "chosen": lambda each: f"{each.erasure.chosen_count:,} by {each.erasure.chosen_by}",
        "rows here": lambda each: each.erasure.history_rows + each.erasure.letter_rows,
        "in the lake": lambda each: each.erasure.lake_history_rows + each.erasure.lake_letter_rows,
        "state": lambda each: each.state.value,
    }
    blocks: list[Block] = [Table.of("erased: content that is gone on purpose; no row is lost", found, columns)]
    if is_unfinished(found):
        blocks.append("\nsome are not done: run durable-agent pipeline erase with the same --id or --key again")
    return blocks


def is_unfinished(found: Sequence[Listed]) -> bool:
    return any(each.state is not State.DONE for each in found)


# ---------------------------------------------------------------- input


def _chosen(ids: Sequence[str], keys: Sequence[str]) -> Chosen:
    if bool(ids) == bool(keys):
        raise InvalidSetting("erase: choose messages by --id or by --key, one of both")
    if any(not key for key in keys):
        raise InvalidSetting("--key: the key is empty; messages without a key are erased by --id")
    return Chosen(ids=[parse_id(each) for each in dict.fromkeys(ids)], keys=list(dict.fromkeys(keys)))


def _refuse_reason(reason: str, chosen: Chosen) -> None:
    if not reason.strip() or not reason.isprintable():
        raise InvalidSetting("--reason: printable text, such as 'request 4711 of 3 May'")
    if any(key in reason for key in chosen.keys):
        raise InvalidSetting(
            "--reason: the reason holds the key that is to be erased, and would keep it; name a request instead"
        )


def _confirm(there: Survey) -> None:
    if there.is_empty:
        return
    if is_json() or not sys.stdin.isatty():
        raise InvalidSetting("erase: erased messages cannot be brought back; give --yes, or --dry-run to count only")
    print_blocks(_blocks(there, None, None))
    typer.confirm("erase them for good?", abort=True, err=True)


# ---------------------------------------------------------------- what is shown


def _document(origin: Origin, there: Survey, done: Erasure | None, removed: int | None) -> dict[str, Any]:
    return {
        "service": origin.service,
        "dry_run": done is None,
        "found": {
            "history": there.here.history,
            "dead_letters": there.here.letters,
            "open_letters": there.here.open_letters,
            "waiting": there.here.waiting,
            "lake_history": there.lake["history"],
            "lake_dead_letters": there.lake["dead_letters"],
        },
        "others": [{"service": whose[0], "database": whose[1], "rows": rows} for whose, rows in there.others.items()],
        "erasure": None if done is None else _record(done),
        "files_removed": removed,
    }


def _record(erasure: Erasure) -> dict[str, Any]:
    return {name: value for name, value in erasure._asdict().items() if name not in ("choice_digest", "lake_id")}


def _blocks(there: Survey, done: Erasure | None, removed: int | None) -> list[Block]:
    here = there.here
    if done is None:
        title, counts = "would be erased", [here.history, here.letters, *there.lake.values()]
    else:
        title = "erased"
        counts = [done.history_rows, done.letter_rows, done.lake_history_rows, done.lake_letter_rows]
    places = ["history", "dead letters", "history in the lake", "dead letters in the lake"]
    blocks: list[Block] = [Table(title, ["where", "rows"], [*zip(places, counts, strict=True)])]
    if done is not None:
        blocks.append(f"\nerasure {done.erasure_id}, by {done.actor}: {done.reason}")
    if here.open_letters:
        blocks.append(f"open letters among them, which are discarded: {here.open_letters:,}")
    if removed is not None:
        blocks.append(f"files removed from the lake: {removed:,}")
    for whose, rows in there.others.items():
        blocks.append(f"left: {rows:,} rows of {whose.service}, database {whose.database}: erase them from there")
    if here.waiting:
        blocks.append(
            f"left: {here.waiting:,} messages that still wait; erase again when they are handled or cancelled"
        )
    return blocks
