"""pipeline conversations: what one message led to, or which conversations took longest, over services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from durable.cli.arguments import parse_id
from durable.cli.command import reading
from durable.cli.output import Block, Columns, Table, phases
from durable.cli.pipeline.options import SparkPlace, find_lake, row_count
from durable.cli.pipeline.report import Since, Until, parse_period_of_days
from durable.cli.pipeline.steps import Ended, Step
from durable.grammar import several
from durable.pipeline.session import needs_spark, spark_errors
from durable.settings import load_settings

if TYPE_CHECKING:
    from durable.pipeline import trees
    from durable.pipeline.conversations import Overview


class Order(StrEnum):
    SLOWEST = "slowest"
    DEEPEST = "deepest"
    LARGEST = "largest"


Lakes = Annotated[
    list[str] | None,
    typer.Option("--lake", metavar="PLACE", help="a folder or URL, instead of DURABLE_LAKE; may be repeated"),
]
Id = Annotated[
    str | None, typer.Option("--id", metavar="UUID", help="the conversation of this id, or of this message, as a tree")
]
Sort = Annotated[Order, typer.Option("--sort", help="order of the conversations")]
Count = Annotated[int, typer.Option("--count", min=1, max=10_000, help="conversations that are listed")]


@reading(spark=SparkPlace)
def conversations(
    spark: SparkPlace,
    lake: Lakes = None,
    id_: Id = None,
    sort: Sort = Order.SLOWEST,
    count: Count = 20,
    since: Since = None,
    until: Until = None,
) -> Step:
    """List conversations by duration, depth or size; or show one as a tree of what caused what."""
    settings = load_settings()
    places = [find_lake(place, settings) for place in (lake or (None,))]
    days = parse_period_of_days(since, until)
    wanted = None if id_ is None else parse_id(id_)
    local_rows = spark.few_rows(settings)
    if not local_rows:
        spark.check()
    with needs_spark():
        from durable.pipeline import conversations, few_conversations
    yield
    for place in places:
        place.require("history")
    if wanted is None and not any(place.files("history") for place in places):
        return Ended(asdict(conversations.NONE), ["no lake has a row of history yet: there is no conversation"])
    with phases("conversations") as phase:
        find, overview = few_conversations.find, few_conversations.overview
        if row_count(places) > local_rows:
            phase("starting Spark")
            session = spark.open_session(places)
            find, overview = partial(conversations.find, session), partial(conversations.overview, session)
        phase("reading history")
        with spark_errors():
            if wanted is not None:
                *earlier, found = find(places, wanted, dedupe_window=settings.dedupe_window)
                document = {**_document(found), "earlier": [_document(each) for each in earlier]}
                return Ended(document, _trees([*earlier, found]))
            window = settings.dedupe_window
            seen = overview(places, since=days[0], until=days[1], order=sort, count=count, dedupe_window=window)
    return Ended(asdict(seen), _list(seen, sort))


def _list(seen: Overview, order: Order) -> list[Block]:
    columns: Columns = {
        "conversation": "correlation_id",
        "took": lambda row: f"{row['seconds']:.3f} s",
        "messages": "messages",
        "depth": "depth",
        "critical path": lambda row: " > ".join(
            f"{step['message_type']} {step['milliseconds']:,.0f} ms" for step in row["path"]
        ),
    }
    return [
        f"{several(seen.conversations, 'conversations')} of {several(seen.messages, 'messages')}; {_quantiles(seen)}, "
        f"the deepest has {seen.deepest} levels",
        Table.of(f"the {order.value}", seen.chosen, columns),
    ]


def _quantiles(seen: Overview) -> str:
    if seen.p50_seconds is None or seen.p95_seconds is None:
        return "none took any time"
    return f"half took up to {seen.p50_seconds:.3f} s, 95 % up to {seen.p95_seconds:.3f} s"


def _trees(found: Sequence[trees.Conversation]) -> list[Block]:
    """One for each use of a business key."""
    each = [[*_tree(one), ""] for one in found]
    return [*chain.from_iterable(each), "* on the critical path: the chain that ended last"]


def _tree(found: trees.Conversation) -> list[Block]:
    """A line for each message under the one that caused it; those of the critical path are marked."""
    from durable.pipeline.conversations import moment

    critical = {message.id for message in found.path}
    lines: list[Block] = [
        f"conversation {UUID(bytes=found.correlation_id)}: {several(len(found.messages), 'messages')}, "
        f"depth {found.depth}, "
        f"{(found.ended_at - found.began_at) / 1e6:.3f} s from {moment(found.began_at):%Y-%m-%d %H:%M:%S.%f} UTC",
        "",
    ]
    for message, level in _walk(found):
        mark = "*" if message.id in critical else " "
        took = (message.ended_at - message.sent_at) / 1_000
        ends = ", ".join(f"{row.outcome} {row.service} {row.address}" for row in message.rows)
        after = (message.sent_at - found.began_at) / 1_000
        lines.append(f"{mark} {'  ' * level}{message.message_type}  +{after:,.1f} ms, took {took:,.1f} ms  ({ends})")
    return lines


def _document(found: trees.Conversation) -> Mapping[str, Any]:
    """The same for JSON."""
    from durable.pipeline.conversations import moment, steps

    return {
        "correlation_id": UUID(bytes=found.correlation_id),
        "depth": found.depth,
        "began": moment(found.began_at),
        "ended": moment(found.ended_at),
        "path": steps(found.path),
        "messages": [
            {
                "id": UUID(bytes=message.id),
                "caused_by": None if message.caused_by is None else UUID(bytes=message.caused_by),
                "level": level + 1,
                "message_type": message.message_type,
                "source": message.source,
                "sent_at": moment(message.sent_at),
                "ended_at": moment(message.ended_at),
                "rows": [
                    {"service": row.service, "side": row.side, "outcome": row.outcome, "address": row.address}
                    for row in message.rows
                ],
            }
            for message, level in _walk(found)
        ],
    }


def _walk(found: trees.Conversation) -> list[tuple[trees.Message, int]]:
    """Each message after the one that caused it, with its level. Not by recursion: a chain may be of any length."""
    from durable.pipeline.trees import children

    below = children(found.messages)
    waiting = [(message, 0) for message in reversed(below.get(None, []))]
    walked = []
    while waiting:
        message, level = waiting.pop()
        walked.append((message, level))
        waiting += [(each, level + 1) for each in reversed(below.get(message.id, []))]
    return walked
