"""pipeline replay: archived messages into the outbox or the inbox again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from durable.cli.command import reading
from durable.cli.output import Table, phases, progress
from durable.cli.pipeline.choice import Chosen, read_choice
from durable.cli.pipeline.options import LakeUrl, SparkPlace, find_lake
from durable.cli.pipeline.steps import Ended, Step
from durable.cli.target import Target, connection, load_target, ring_of
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.session import needs_spark, spark_errors
from durable.pipeline.texts import check_name
from durable.pipeline.undisturbed import Undisturbed, publishing
from durable.storage import archives, placements, purging, registry, replays
from durable.storage.readiness import check_ready

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from durable.bus import Bus
    from durable.pipeline.choosing import Choice, Group
    from durable.pipeline.lake import Lake
    from durable.pipeline.plans import Plan
    from durable.pipeline.progress import Phases
    from durable.pipeline.recognition import Here
    from durable.settings import Settings


Name = Annotated[
    str,
    typer.Option("--name", metavar="NAME", help="name of the replay; under one name a message is replayed once"),
]
Destination = Annotated[
    str | None, typer.Option("--destination", metavar="URI", help="address to send to; local for this service's inbox")
]
SameIds = Annotated[
    bool, typer.Option("--same-ids", help="keep the ids: only services that never saw a message handle it")
]
LeaveUnopened = Annotated[
    bool,
    typer.Option(
        "--leave-unopened", help="leave out messages whose encrypted bodies do not open, such as for lack of their key"
    ),
]
OrderBy = Annotated[
    list[str] | None,
    typer.Option(
        "--order-by", metavar="COLUMN", help="column that orders the messages; several are compared one by one"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="count the messages, and change nothing")]
Rate = Annotated[float | None, typer.Option("--rate", metavar="N", min=0.1, help="most messages a second")]
Chunk = Annotated[int, typer.Option("--chunk", metavar="N", min=1, help="messages in one transaction")]


@reading(target=load_target, spark=SparkPlace, chosen=read_choice)
def replay(
    target: Target,
    spark: SparkPlace,
    chosen: Chosen,
    name: Name,
    lake: LakeUrl = None,
    destination: Destination = None,
    same_ids: SameIds = False,
    leave_unopened: LeaveUnopened = False,
    order_by: OrderBy = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    chunk: Chunk = 50_000,
) -> Step:
    """Send archived messages again, or have them handled again. The same replay a second time adds nothing."""
    from durable.pipeline.plans import begun, chosen_by, plan_of
    from durable.pipeline.replayable import check_place

    check_name("--name", name)
    bus, settings = target
    choice, parquet, since, until = chosen
    place = None if parquet is not None else find_lake(lake, settings)
    plan = plan_of(
        choice,
        place={"lake": place.url} if place is not None else {"parquet": parquet or ""},
        times={"since": since, "until": until},
        destination=destination,
        same_ids=same_ids,
        order_by=order_by or None,
    )
    spark.check()
    yield
    asked, plan = plan, _continued(settings, name, plan)
    given, choice = choice, chosen_by(plan, choice)
    if place is not None:
        place.require(choice.table)
    else:
        check_place(plan["parquet"])
    if bus is not None and not dry_run:
        _declare(bus, settings)
    with needs_spark():
        from durable.pipeline.recognition import refuse_unrecognised
        from durable.pipeline.replay import messages, opened, refuse_foreign, refuse_forgotten, refuse_overdue
        from durable.pipeline.sealing import Sealing
        from durable.pipeline.unmatched import refuse_unmatched
    sealing = Sealing.of(ring_of(target))
    with ExitStack() as stack:
        undisturbed = None if dry_run else stack.enter_context(publishing(settings, place))
        with phases("replay") as phase:
            phase("starting Spark")
            session = spark.open_session([place] if place else None)
            rows, others = _chosen(session, choice, place, plan, phase)
            of_opened = partial(opened, same_ids=same_ids, destination=destination, sealing=sealing)
            found = _without_repeats(rows, choice, settings, phase, of_opened if leave_unopened else None)
            rows, repeats = stack.enter_context(found)
            groups = _surveyed(rows, phase)
            refuse_unmatched(lambda: _every(session, choice, place, plan["parquet"]), given, groups)
            if same_ids:
                refuse_unrecognised(groups, destination, _here(target))
            if same_ids and place is not None:
                refuse_foreign(rows, _database(settings))
        named = messages(
            rows,
            name=name,
            same_ids=same_ids,
            destination=destination,
            order_by=plan["order-by"],
            sealing=sealing,
            leave_unopened=leave_unopened,
        )
        if same_ids:
            refuse_forgotten(named, settings.dedupe_window, _dropped_until(settings))
        if plan is asked:
            refuse_overdue(named)
        if groups and not dry_run:
            _begin(settings, name, begun(plan, groups))
        left = _unopened(named, groups) if leave_unopened else 0
        outcome = _replay(named, groups, left, settings, undisturbed, rate, chunk) | {
            "repeats": repeats,
            "other_outcomes": others,
        }
    return Ended(
        outcome | {"name": name, "dry_run": dry_run, "groups": [group._asdict() for group in groups]},
        [_table(groups), _sentence(outcome, dry_run)],
    )


def _declare(bus: Bus, settings: Settings) -> None:
    """Declare the order of the bus's code, as a node would, for rows that are published before a node has started."""
    with connection(settings) as conn:
        check_ready(conn, settings.db_schema)
        placements.declare(conn, settings.db_schema, bus.application.placements())


def _database(settings: Settings) -> str | None:
    with connection(settings, read_only=True) as conn:
        return archives.known_database(conn, settings.db_schema)


def _here(target: Target) -> Here:
    """Find this service by its database, and by its code where that is given."""
    from durable.pipeline.recognition import Here

    bus, settings = target
    with connection(settings, read_only=True) as conn:
        services = archives.services(conn, settings.db_schema)
        addresses = registry.own_addresses(conn, settings.db_schema)
    if bus is not None:
        services = services or [bus.service]
        addresses += [each.uri for each in bus.application.listeners]
    return Here(services=services, addresses=addresses, host=settings.call_host)


def _dropped_until(settings: Settings) -> datetime | None:
    with connection(settings, read_only=True) as conn:
        return purging.dropped_until(conn, settings.db_schema, settings.history_retention)


def _continued(settings: Settings, name: str, plan: Plan) -> Plan:
    """Return the plan of the first run under this name. Raises InvalidSetting when this run has another."""
    from durable.pipeline.plans import continued

    with connection(settings, read_only=True) as conn:
        check_ready(conn, settings.db_schema)
        known = replays.find(conn, settings.db_schema, name)
    return plan if known is None else continued(name, known, plan)


def _begin(settings: Settings, name: str, plan: Plan) -> None:
    """Write the plan before the first message. Raises InvalidSetting when another run has just begun with another."""
    from durable.pipeline.plans import continued

    with connection(settings) as conn:
        begun = replays.begin(conn, settings.db_schema, name, plan)
    if continued(name, begun, plan) != plan:
        raise InvalidSetting(f"replay {name!r}: another run has just begun it at another time; run it again")


def _chosen(spark: SparkSession, choice: Choice, lake: Lake | None, plan: Plan, phase: Phases) -> tuple[DataFrame, int]:
    """Read the messages of the choice; of files, count those that only their outcome leaves out."""
    from durable.pipeline import choosing
    from durable.pipeline.plans import end_of, found_by

    end = end_of(plan)
    found = found_by(plan)
    if lake is not None:
        rows = choosing.choose(spark, lake, choice, phase("comparing files"))
        return choosing.alike(choosing.before(rows, end), found), 0
    with spark_errors():
        rows = choosing.alike(choosing.before(_every(spark, choice, None, plan["parquet"]), end), found)
        choosing.refuse_timeless(rows, choice)
        return choosing.matching(rows, choice), choosing.count_of_other_outcomes(rows, choice)


def _every(spark: SparkSession, choice: Choice, lake: Lake | None, parquet: str | None) -> DataFrame:
    """Read what is chosen from."""
    from durable.pipeline import choosing, replayable

    return choosing.complete(replayable.read(spark, parquet or "")) if lake is None else lake.read(spark, choice.table)


@contextmanager
def _without_repeats(
    rows: DataFrame,
    choice: Choice,
    settings: Settings,
    phase: Phases,
    opened: Callable[[DataFrame], DataFrame] | None = None,
) -> Iterator[tuple[DataFrame, int]]:
    """Leave out what was sent once more under a business key; return the number of those, too.

    They are looked at for each chunk, and are kept until the context ends: Spark would take what it keeps for the
    repeats of other files that are put into the same place. With `opened`, they are those of the rows that it returns:
    what is left out has no repeat. It is asked only where there are any.
    """
    from durable.pipeline import repeats

    if choice.table != "history":
        yield rows, 0
        return
    phase("finding repeats")
    with spark_errors():
        found = repeats.repeats(rows, settings.dedupe_window).persist()
    try:
        with spark_errors():
            count = found.count()
            if count and opened is not None:
                found.unpersist()
                found = repeats.repeats(opened(rows), settings.dedupe_window).persist()
                count = found.count()
        yield (repeats.without(rows, found) if count else rows), count
    finally:
        found.unpersist()


def _surveyed(rows: DataFrame, phase: Phases) -> list[Group]:
    from durable.pipeline import choosing

    phase("counting messages")
    groups = choosing.survey(rows)
    if others := {group.side for group in groups} - {"incoming", "outgoing"}:
        other = ", ".join(sorted(map(repr, others)))
        raise InvalidSetting(f"column side: {other} is neither 'incoming' nor 'outgoing'; correct it in the files")
    for option, named in (("--service", {g.service for g in groups}), ("--side", {g.side for g in groups})):
        if len(named) > 1:
            without = ', or those of none by --where "service IS NULL"' if None in named else ""
            several_named = " and ".join(sorted("none" if each is None else each for each in named))
            raise InvalidSetting(f"{option}: the messages are of {several_named}; choose one{without}")
    if groups and all(group.messages == group.without_body for group in groups):
        raise InvalidSetting(
            "history_bodies: none of these messages has its body; history keeps bodies only while the setting is on"
        )
    return groups


def _replay(
    chosen: DataFrame,
    groups: Sequence[Group],
    unopened: int,
    settings: Settings,
    undisturbed: Undisturbed | None,
    rate: float | None,
    chunk: int,
) -> dict[str, int]:
    """Publish them; without a guard against erasures they are counted only."""
    with needs_spark():
        from durable.pipeline import replay

    without_body = sum(group.without_body for group in groups)
    total = _with_body(groups) - unopened
    added = 0
    if undisturbed is not None:
        with progress("replay: publishing") as show:
            total, added = replay.replay(
                chosen, settings, total=total, chunk_size=chunk, rate=rate, show=show, check=undisturbed.check
            )
    return {"messages": total, "without_body": without_body, "unopened": unopened, "added": added}


def _with_body(groups: Sequence[Group]) -> int:
    return sum(group.messages - group.without_body for group in groups)


def _unopened(named: DataFrame, groups: Sequence[Group]) -> int:
    """Count the messages that were left out because their bodies do not open."""
    with spark_errors():
        return _with_body(groups) - named.count()


def _table(groups: Sequence[Group]) -> Table:
    columns = ("service", "side", "message_type", "address", "messages", "without_body", "first", "last")
    return Table.of("chosen", groups, {column.replace("_", " "): column for column in columns})


def _sentence(outcome: dict[str, int], dry_run: bool) -> str:
    left = f"; {outcome['without_body']:,} have no body and stay out" if outcome["without_body"] else ""
    if outcome["repeats"]:
        left += f"; {several(outcome['repeats'], 'repeats', 'stay')} out"
    if outcome["other_outcomes"]:
        left += f"; {several(outcome['other_outcomes'], 'messages', 'have')} another outcome, and stay out"
    if outcome["unopened"]:
        left += f"; {several(outcome['unopened'], 'unopened bodies', 'stay')} out"
    if dry_run:
        return f"{several(outcome['messages'], 'messages')} would be replayed{left}"
    if known := outcome["messages"] - outcome["added"]:
        left = f"; {several(known, 'messages', 'were')} known here, and stay out{left}"
    return f"{several(outcome['messages'], 'messages')} replayed, {outcome['added']:,} of them added{left}"
