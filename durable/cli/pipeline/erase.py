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
from durable.grammar import several
from durable.pipeline import erasing
from durable.pipeline.checksums import Compared
from durable.pipeline.erasing import Listed, Survey
from durable.pipeline.erasures import State
from durable.pipeline.leftovers import Scrubbed
from durable.pipeline.origin import Origin
from durable.pipeline.session import needs_spark
from durable.storage.erasures import Chosen, Erasure, holds

Ids = Annotated[list[str] | None, typer.Option("--id", metavar="UUID", help="message of this id; may be repeated")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="all messages of this partition key; may be repeated"),
]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="reason for the record, which stays; write no names of people")
]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="actor for the record; default: USER@HOST")]
Lost = Annotated[
    list[str] | None,
    typer.Option(
        "--lost-database",
        metavar="NAME",
        help="database of the service that exists no more, whose rows in the lake are erased, too; may be repeated",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="count them, and change nothing")]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]
Vacuum = Annotated[
    bool,
    typer.Option(
        "--vacuum",
        help="remove replaced files, and files that dead writers left, at once: readers of older versions of the lake "
        "fail, and none of these versions can be read again",
    ),
]


@taking(place=load_place)
def erase(
    place: Place,
    reason: Reason,
    ids: Ids = None,
    keys: Keys = None,
    by: By = None,
    lost: Lost = None,
    vacuum: Vacuum = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Erase keys, headers, bodies and error texts of messages, in the database and in the lake, for good.

    Rows stay with ids, types, addresses and times, so that audits find every message. Open letters are discarded. Ends
    with 1 while some of the messages still wait: erase once more when they have been handled or cancelled. With
    --vacuum it ends with 1, too, while another process writes files that may hold erased content.
    """
    chosen = _chosen(ids or [], keys or [])
    actor = by or actor_name()
    _refuse_reason(reason)
    _refuse_key("--reason", reason, chosen)
    _refuse_key("--by", actor, chosen)
    lake = place.lake
    if vacuum and lake is None:
        raise InvalidSetting("--vacuum: there is no lake; give --lake")
    with needs_spark():
        import deltalake  # noqa: F401
    origin = place.find_origin()
    compared = Compared()
    there = erasing.survey(origin, lake, chosen, lost or (), compared)
    if there.is_empty and not there.here.waiting and not dry_run:
        known = erasing.earlier(origin, lake, chosen)
        if not known:
            raise InvalidSetting("erase: no message of these ids or keys is here; nothing was erased")
        if all(each.state is State.DONE for each in known) and not vacuum:
            emit(_document(origin, there, known[-1].erasure, None), *erasure_table(known))
            return
    if not dry_run and not yes:
        _confirm(there)
    done = removed = None
    if not dry_run:
        done = erasing.erase(origin, lake, chosen, actor=actor, reason=reason, lost=lost or (), compared=compared)
        removed = erasing.scrub(origin, lake, chosen, lost or (), compared) if vacuum and lake is not None else None
    emit(_document(origin, there, done, removed), *_blocks(there, done, removed))
    if there.here.waiting or (removed is not None and removed.busy):
        raise typer.Exit(1)


def erasure_rows(found: Sequence[Listed]) -> list[dict[str, Any]]:
    """Return the erasures as status and verify show them in JSON."""
    return [_record(each.erasure) | {"state": each.state.value} for each in found]


def erasure_table(
    found: Sequence[Listed], title: str = "erased: content that is gone on purpose; no row is lost"
) -> list[Block]:
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
    blocks: list[Block] = [Table.of(title, found, columns)]
    if is_unfinished(found):
        blocks.append("\nsome are not done: run durable-agent pipeline erase with the same --id or --key again")
    return blocks


def undone_table(found: Sequence[Listed]) -> list[Block]:
    """The erasures that an archive finds undone, with what to do; nothing where there is none."""
    return erasure_table(found, "erasures that are not whole, here or in the lake: erase once more")


def is_unfinished(found: Sequence[Listed]) -> bool:
    return any(each.state is not State.DONE for each in found)


# ---------------------------------------------------------------- input


def _chosen(ids: Sequence[str], keys: Sequence[str]) -> Chosen:
    if bool(ids) == bool(keys):
        raise InvalidSetting("erase: choose messages by --id or by --key, one of both")
    return Chosen(ids=[parse_id(each) for each in dict.fromkeys(ids)], keys=list(dict.fromkeys(keys)))


def _refuse_reason(reason: str) -> None:
    if not reason.strip() or not reason.isprintable():
        raise InvalidSetting("--reason: printable text, such as 'request 4711 of 3 May'")


def _refuse_key(option: str, text: str, chosen: Chosen) -> None:
    """The record stays, and must not hold what is erased, in whatever case it is written."""
    if any(holds(text, key) for key in chosen.keys):
        raise InvalidSetting(
            f"{option}: it holds the key that is to be erased, and the record would keep it; "
            + ("name a request instead" if option == "--reason" else "name another actor")
        )


def _confirm(there: Survey) -> None:
    if there.is_empty:
        return
    if is_json() or not sys.stdin.isatty():
        raise InvalidSetting("erase: erased messages cannot be brought back; give --yes, or --dry-run to count only")
    print_blocks(_blocks(there, None, None))
    typer.confirm("erase them for good?", abort=True, err=True)


# ---------------------------------------------------------------- what is shown


def _document(origin: Origin, there: Survey, done: Erasure | None, removed: Scrubbed | None) -> dict[str, Any]:
    return {
        "service": origin.service,
        "dry_run": done is None,
        "found": {
            "history": there.here.history,
            "dead_letters": there.here.letters,
            "open_letters": there.here.open_letters,
            "waiting": there.here.waiting,
            "records": there.here.records,
            "lake_history": there.lake["history"],
            "lake_dead_letters": there.lake["dead_letters"],
        },
        "others": [{"service": whose[0], "database": whose[1], "rows": rows} for whose, rows in there.others.items()],
        "erasure": None if done is None else _record(done),
        "files_removed": None if removed is None else removed.removed,
        "files_busy": None if removed is None else removed.busy,
    }


def _record(erasure: Erasure) -> dict[str, Any]:
    return {name: value for name, value in erasure._asdict().items() if name not in ("choice_digest", "lake_id")}


def _blocks(there: Survey, done: Erasure | None, removed: Scrubbed | None) -> list[Block]:
    here = there.here
    if done is None:
        title, counts = "would be erased", [here.history, here.letters, *there.lake.values(), here.records]
    else:
        title = "erased"
        there_now = [done.lake_history_rows, done.lake_letter_rows]
        counts = [done.history_rows, done.letter_rows, *there_now, here.records]
    places = ["history", "dead letters", "history in the lake", "dead letters in the lake", "records of actions"]
    blocks: list[Block] = [Table(title, ["where", "rows"], [*zip(places, counts, strict=True)])]
    if done is not None:
        blocks.append(f"\nerasure {done.erasure_id}, by {done.actor}: {done.reason}")
    if here.open_letters:
        blocks.append(f"open letters among them, which are discarded: {here.open_letters:,}")
    if removed is not None:
        blocks.append(f"files removed from the lake: {removed.removed:,}")
        if removed.busy:
            blocks.append(
                f"left: {several(removed.busy, 'files')} that another process writes, or left unfinished within "
                "the last hour, and that may hold erased content; run the same command again when no compaction runs"
            )
    for whose, rows in there.others.items():
        blocks.append(
            f"left: {several(rows, 'rows')} of {whose.service}, database {whose.database}: erase them from there"
        )
    if there.others:
        blocks.append("rows of a database of this service that exists no more: name it by --lost-database")
    if here.waiting:
        blocks.append(
            f"left: {several(here.waiting, 'messages')} that still wait; erase again when they are done or cancelled"
        )
    return blocks
