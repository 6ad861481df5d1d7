"""actions: what operators did, by command or in the console."""

from __future__ import annotations

from typing import Annotated

import typer

from durable.cli.arguments import parse_period
from durable.cli.output import Table, emit
from durable.cli.target import Target, on_target, schema_connection
from durable.listed import SHOWN
from durable.storage import actions as storage
from durable.storage.actions import Selection

By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="actions of this operator")]
Verb = Annotated[str | None, typer.Option("--verb", metavar="VERB", help="actions of this kind: pause, replay, cancel")]
Of = Annotated[str | None, typer.Option("--target", metavar="TEXT", help="actions whose target contains this text")]
Since = Annotated[str | None, typer.Option("--since", metavar="TIME", help="actions of this time or later: 2h")]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="actions before this time: 1h")]
PageSize = Annotated[int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="actions to show")]
Before = Annotated[int | None, typer.Option("--before", min=1, metavar="NUMBER", help="page after this action")]


@on_target()
def actions(
    target: Target,
    by: By = None,
    verb: Verb = None,
    of: Of = None,
    since: Since = None,
    until: Until = None,
    limit: PageSize = SHOWN,
    before: Before = None,
) -> None:
    """List what operators did, the newest first: who, when, to what, how many, and why.

    Each action is recorded in the transaction of its change, and kept for action_retention.
    """
    settings, (first, last) = target.settings, parse_period(since, until)
    selection = Selection(actor=by, verb=verb, target=of, since=first, until=last)
    with schema_connection(settings) as conn:
        found = storage.page(conn, settings.db_schema, selection, limit=limit + 1, before=before)
    shown = found[:limit]
    following = shown[-1].number if len(found) > limit else None
    rows = [each._asdict() for each in shown]
    more = () if following is None else (f"older ones: --before {following}",)
    emit({"actions": rows, "before": following}, Table.of("actions", shown, _COLUMNS), *more)


_COLUMNS = {
    "number": "number",
    "when": "began_at",
    "by": "actor",
    "what": "verb",
    "target": "target",
    "changed": "changed",
    "reason": "reason",
}
