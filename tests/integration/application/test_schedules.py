"""Recurring schedules with real nodes on a real Postgres: once over all of them, and by the newest declaration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from durable import Bus, Context, message
from durable.embedded import Embedded
from durable.errors import InvalidMessage, InvalidSetting, RoutingError
from durable.process import dispatching
from durable.recovery import agent
from durable.recovery.incoming_claims import claim_incoming
from durable.recovery.recurring_schedules import Look, Recurring
from durable.storage import circuits, schedules
from durable.storage.circuits import CircuitKind
from durable.storage.new_work import ANYWHERE
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.failure import leftovers
from tests.failure.workbench import QUICK
from tests.support.tables import Tables, shared_tables

NEVER = "0 0 29 2 *"  # not while a test runs, unless on a bad day
EVERY_SECOND = "* * * * * *"
PEER = "memory://elsewhere"


@message("recurring.tick")
class Tick(msgspec.Struct):
    number: int = 0


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


class Works:
    """Nodes of one service on one database, and what they have handled."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.handled: list[tuple[int, str]] = []
        """Numbers, and the occurrences that their headers name."""

    def node(self, cron: str = NEVER, made: Any = Tick(), name: str = "ticks", **options: Any) -> Bus:  # noqa: B008
        settings = {**QUICK, **options.pop("settings", {})}
        bus = Bus("works", self.tables.url, transports=[MemoryTransport(Bus("x").settings)], **settings)

        @bus.handles(Tick)
        async def tick(tick: Tick, ctx: Context) -> None:
            self.handled.append((tick.number, ctx.headers.get("occurrence", "")))

        if cron:
            bus.every(cron, made, name=name, **options)
        return bus

    def row(self, columns: str = "*", name: str = "ticks") -> Any:
        return self.tables.one(f"SELECT {columns} FROM durable.schedules WHERE name = %s", name)

    async def looked_at(self, name: str = "ticks") -> None:
        """Until a node has found its next occurrence."""
        there = "SELECT occurrence_at IS NOT NULL FROM durable.schedules WHERE name = %s"
        await eventually(lambda: self.tables.rows(there, name) == [True])

    async def miss(self, by: timedelta) -> None:
        """As if no node had run for so long."""
        await self.tables.change("UPDATE durable.schedules SET occurrence_at = now() - %s, due_at = now() - %s", by, by)

    def has_finished(self, count: int) -> bool:
        return self.tables.count("envelope_history") >= count

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.handled]


@pytest.fixture
def works(database: Tables) -> Works:
    database.clear()
    return Works(database)


class TestOnceOverAllNodes:
    async def test_each_occurrence_runs_once_and_on_time_however_many_nodes_there_are(self, works: Works) -> None:
        slow = {"poll_interval": timedelta(minutes=5)}  # so it is the schedule that wakes them
        nodes = [works.node(EVERY_SECOND, misfire="all", settings=slow) for _ in range(3)]
        async with nodes[0], nodes[1], nodes[2]:
            await eventually(lambda: len(works.handled) >= 3)
        occurrences = [datetime.fromisoformat(occurrence) for _, occurrence in works.handled]
        assert len(set(occurrences)) == len(occurrences)
        assert {b - a for a, b in pairwise(sorted(occurrences))} == {timedelta(seconds=1)}
        received = works.tables.rows("SELECT received_at FROM durable.envelope_history ORDER BY received_at")
        assert all(at - due < timedelta(minutes=1) for at, due in zip(received, occurrences, strict=False))

    async def test_occurrence_found_by_two_nodes_at_once_runs_once(self, works: Works) -> None:
        first, second = works.node(), works.node()
        async with first, second:
            await works.looked_at()
            for count in range(1, 21):
                await works.miss(timedelta(seconds=1))
                await works.tables.change("SELECT pg_notify('durable_durable', '')")
                await eventually(partial(works.has_finished, count))
        assert len(works.handled) == 20

    async def test_node_skips_a_locked_schedule_and_then_finds_the_occurrence_done(self, works: Works) -> None:
        async with works.node():
            await works.looked_at()
            declaration = works.row("declaration")
        await works.miss(timedelta(seconds=1))
        url = works.tables.url
        with leftovers.transaction(url) as first, leftovers.transaction(url) as second:
            due = schedules.lock_due(first, "durable", "ticks", declaration)
            assert due is not None
            assert schedules.lock_due(second, "durable", "ticks", declaration) is None
            following = due.now + timedelta(hours=1)
            schedules.move_on(first, "durable", "ticks", occurrence_at=following, last_at=None, message_type=None)
            first.commit()
            assert schedules.lock_due(second, "durable", "ticks", declaration) is None

    async def test_message_of_a_schedule_goes_to_its_route(self, works: Works) -> None:
        bus = works.node("", settings={"poll_interval": timedelta(seconds=5)})
        bus.every(EVERY_SECOND, Tick(), name="far", to=PEER)
        async with bus:
            await eventually(lambda: works.tables.count("outgoing_envelopes") > 0)
        assert works.tables.rows("SELECT DISTINCT destination FROM durable.outgoing_envelopes") == [PEER]
        assert works.handled == []

    async def test_schedule_without_a_destination_prevents_the_start(self, works: Works) -> None:
        bus = Bus("works", works.tables.url, **QUICK)
        bus.every(NEVER, Tick(), name="ticks")
        with pytest.raises(RoutingError, match="no destination"):
            async with bus:
                pass


class TestMissed:
    @pytest.mark.parametrize(("misfire", "count"), [("once", 1), ("all", 4), ("skip", 0)])
    async def test_occurrences_missed_without_a_node_run_as_declared(
        self, works: Works, misfire: Any, count: int
    ) -> None:
        async with works.node("0 * * * *", misfire=misfire):
            await works.looked_at()
        await works.tables.change(
            "UPDATE durable.schedules SET occurrence_at = date_trunc('hour', now()) - interval '3 hours', "
            "due_at = date_trunc('hour', now()) - interval '3 hours'"
        )
        within_the_grace = works.tables.one("SELECT now() - date_trunc('hour', now()) <= interval '2 minutes'")
        async with works.node("0 * * * *", misfire=misfire):
            await eventually(lambda: works.row("due_at > now()"))
            await eventually(lambda: works.tables.count("incoming_envelopes") == 0)
        if not (misfire == "skip" and within_the_grace):
            assert len(works.handled) == count
        assert works.handled == sorted(works.handled)

    async def test_new_schedule_has_missed_no_occurrence(self, works: Works) -> None:
        async with works.node("0 * * * *"):
            await works.looked_at()
        assert works.row("due_at = occurrence_at AND due_at > now() AND last_at IS NULL")


class TestVersionsOfTheCode:
    async def test_the_declaration_of_the_youngest_node_counts(self, works: Works) -> None:
        old, new = works.node(made=Tick(1)), works.node(made=Tick(2))
        async with old:
            await works.looked_at()
            async with new:
                young = new.runtime.node_id
                await eventually(lambda: works.row("declared_by") == young)
                for count in range(1, 11):
                    await works.miss(timedelta(seconds=1))
                    await eventually(partial(works.has_finished, count))
            await eventually(lambda: works.row("declared_by") == old.runtime.node_id)
            await works.miss(timedelta(seconds=1))
            await eventually(lambda: works.numbers == [2] * 10 + [1])

    async def test_changed_cron_counts_from_its_declaration(self, works: Works) -> None:
        async with works.node("0 0 1 1 *"):
            await works.looked_at()
        await works.miss(timedelta(days=1))
        async with works.node("0 0 1 2 *"):
            await eventually(lambda: works.row("cron") == "0 0 1 2 *")
            await works.looked_at()
        assert works.handled == []
        assert works.row("EXTRACT(month FROM due_at AT TIME ZONE 'UTC')") == 2

    async def test_schedule_with_another_message_keeps_its_occurrences(self, works: Works) -> None:
        async with works.node(made=Tick(1)):
            await works.looked_at()
        await works.miss(timedelta(seconds=1))
        async with works.node(made=Tick(2)):
            await eventually(lambda: works.numbers == [2])

    async def test_schedule_undeclared_by_running_code_does_not_run(self, works: Works) -> None:
        async with works.node():
            await works.looked_at()
        await works.miss(timedelta(hours=1))
        async with works.node(""), works.node(name="others"):
            await works.looked_at("others")
            assert works.row("due_at < now()")
            assert works.handled == []
        async with works.node():
            await eventually(lambda: works.numbers == [0])


class TestTrouble:
    async def test_failing_factory_is_recorded_and_retried_and_harms_no_other_schedule(self, works: Works) -> None:
        broken = [True]

        def make(at: datetime) -> Tick:
            if broken:
                raise TimeoutError("the rates are not out yet")
            return Tick(at.year)

        bus = works.node(made=make, name="broken")
        bus.every(EVERY_SECOND, Tick(7), name="sound")
        async with bus:
            await works.looked_at("broken")
            await works.tables.change("UPDATE durable.schedules SET due_at = now() WHERE name = 'broken'")
            await eventually(lambda: works.row("error", "broken") == "RuntimeError: the rates are not out yet")
            await eventually(lambda: 7 in works.numbers)
            due = works.row("occurrence_at", "broken")
            broken.clear()
            await works.tables.change("UPDATE durable.schedules SET due_at = now() WHERE name = 'broken'")
            await eventually(lambda: due.year in works.numbers)
            assert works.row("last_at", "broken") == due
            assert works.row("error", "broken") is None

    @pytest.mark.parametrize("misfire", ["once", "all", "skip"])
    async def test_occurrence_with_one_failure_runs_with_the_next_one(self, works: Works, misfire: Any) -> None:
        failed = list[datetime]()

        def make(at: datetime) -> Tick:
            if not failed:
                failed.append(at)
                raise LookupError("the rates are not out yet")
            return Tick(at.year)

        async with works.node(EVERY_SECOND, made=make, misfire=misfire):
            await eventually(lambda: len(works.handled) >= 3)
        occurrences = sorted(datetime.fromisoformat(occurrence) for _, occurrence in works.handled)
        assert occurrences[:2] == [failed[0], failed[0] + timedelta(seconds=1)]

    @pytest.mark.parametrize("misfire", ["once", "skip"])
    async def test_occurrence_failing_for_ever_gives_way_to_those_behind(self, works: Works, misfire: Any) -> None:
        first = list[datetime]()

        def make(at: datetime) -> Tick:
            first[:] = first or [at]
            if at == first[0]:
                raise LookupError("no rates on a holiday")
            return Tick(at.year)

        async with works.node(EVERY_SECOND, made=make, misfire=misfire):
            await eventually(lambda: len(works.handled) >= 3)
        occurrences = sorted(datetime.fromisoformat(occurrence) for _, occurrence in works.handled)
        assert occurrences[0] == first[0] + timedelta(seconds=1)

    async def test_occurrence_is_not_lost_with_the_next_one(self, works: Works) -> None:
        tries = list[datetime]()

        def make(at: datetime) -> Tick:
            tries.append(at)
            if at in sorted(set(tries))[:2] and tries.count(at) == 1:
                raise LookupError("the rates are not out yet")
            return Tick(at.year)

        async with works.node(EVERY_SECOND, made=make):
            await eventually(lambda: len(works.handled) >= 3)
        assert tries[0] in [datetime.fromisoformat(occurrence) for _, occurrence in works.handled]

    async def test_failing_occurrence_prevents_no_earlier_one_and_no_run_by_hand(self, works: Works) -> None:
        def make(at: datetime) -> Tick:
            if at.minute == at.second == 0 and at == sorted(missed)[2]:
                raise LookupError("no rates on a holiday")
            return Tick(at.year)

        async with works.node("0 * * * *", misfire="all", made=make):
            await works.looked_at()
            await works.tables.change(
                "UPDATE durable.schedules SET occurrence_at = date_trunc('hour', now()) - interval '3 hours', "
                "due_at = date_trunc('hour', now()) - interval '3 hours', asked_at = now()"
            )
            first = works.row("occurrence_at")
            missed = [first + timedelta(hours=hour) for hour in range(4)]
            await eventually(lambda: works.row("error") is not None)
            await eventually(lambda: len(works.handled) == 3)
            assert works.row("occurrence_at") == missed[2]
            assert works.row("asked_at IS NULL")
        assert {datetime.fromisoformat(occurrence) for _, occurrence in works.handled} >= set(missed[:2])

    async def test_failing_occurrence_from_before_its_time_is_told(self, works: Works) -> None:
        def fail(at: datetime) -> Tick:
            raise LookupError("the rates are not out yet")

        bus = works.node(made=fail)
        async with bus:
            await works.looked_at()
            assert await bus.reschedule_next("ticks", delay=0)
            await eventually(lambda: works.row("error") is not None)
            with leftovers.transaction(works.tables.url) as conn:
                (late,) = schedules.late(conn, "durable", 10)
        assert late.error == "LookupError: the rates are not out yet"

    @pytest.mark.parametrize("meanwhile", ["a run by hand", "another node"])
    async def test_error_is_shown_as_long_as_the_occurrence_fails(self, works: Works, meanwhile: str) -> None:
        occurrences = list[datetime]()

        def make(at: datetime) -> Tick:
            if at in occurrences:
                raise LookupError("the rates are not out yet")
            return Tick(at.year)

        bus, other = works.node(made=make), works.node(made=make)
        async with bus:
            await works.looked_at()
            occurrences.append(works.row("occurrence_at"))
            assert await bus.reschedule_next("ticks", delay=0)
            await eventually(lambda: works.row("error") is not None)
            if meanwhile == "a run by hand":
                assert await bus.run_schedule("ticks")
                await eventually(lambda: len(works.handled) == 1)
            else:
                async with other:
                    await eventually(lambda: works.row("declared_by") == other.runtime.node_id)
            assert works.row("error") == "LookupError: the rates are not out yet"

    async def test_failing_schedule_in_a_pause_keeps_its_error_and_is_not_written(self, works: Works) -> None:
        def fail(at: datetime) -> Tick:
            raise LookupError("the rates are not out yet")

        bus = works.node(made=fail)
        bus.every(EVERY_SECOND, Tick(7), name="others")
        async with bus:
            await works.looked_at()
            await works.miss(timedelta(hours=1))
            await eventually(lambda: works.row("error") is not None)
            await bus.pause(schedule="ticks")
            await works.miss(timedelta(hours=1))
            version, runs = works.row("xmin::text"), len(works.handled)
            await eventually(lambda: len(works.handled) >= runs + 3)
            assert works.row("xmin::text") == version
            assert works.row("error") == "LookupError: the rates are not out yet"

    async def test_late_and_failing_schedules_are_told(self, works: Works) -> None:
        def fail(at: datetime) -> Tick:
            raise LookupError("the rates are not out yet")

        def told() -> list[tuple[str, bool, int, str | None]]:
            with leftovers.transaction(works.tables.url) as conn:
                late = schedules.late(conn, "durable", 10)
            return [(each.name, each.is_live, round(each.late.total_seconds()), each.error) for each in late]

        bus = works.node(EVERY_SECOND, made=fail)
        bus.every(NEVER, Tick(7), name="sound")
        async with bus:
            await works.looked_at("sound")
            await eventually(lambda: len(told()) == 1 and told()[0][2] >= 3)
            assert told()[0][:2] == ("ticks", True)
            assert told()[0][3] == "LookupError: the rates are not out yet"
            await bus.pause(schedule="ticks")
            assert told() == []
            await bus.resume(schedule="ticks")
        await works.miss(timedelta(hours=1))
        assert [(name, is_live) for name, is_live, *_ in told()] == [("sound", False), ("ticks", False)]
        assert told()[0][2:] == (3_600, None)

    async def test_run_by_hand_is_tried_again_after_a_failure(self, works: Works) -> None:
        broken = [True]

        def make(at: datetime) -> Tick:
            if broken:
                raise RuntimeError("the rates are not out yet")
            return Tick(at.year)

        bus = works.node(made=make)
        async with bus:
            await works.looked_at()
            due = works.row("due_at")
            assert await bus.run_schedule("ticks")
            await eventually(lambda: works.row("error") == "RuntimeError: the rates are not out yet")
            assert works.row("asked_at > now()")
            broken.clear()
            await works.miss(timedelta(seconds=1))  # an occurrence between leaves it alone
            await eventually(lambda: len(works.handled) == 1)
            assert works.row("asked_at > now() AND error IS NULL")
            await works.tables.change("UPDATE durable.schedules SET asked_at = now()")
            await eventually(lambda: len(works.handled) == 2)
            assert works.row("asked_at IS NULL")
            assert works.row("due_at") == due

    async def test_failing_occurrence_from_before_the_first_look_is_recorded(self, works: Works) -> None:
        def make(at: datetime) -> Tick:
            raise RuntimeError("the rates are not out yet")

        async with works.node("0 * * * *", made=make):
            await works.looked_at()
            await works.tables.change(
                "UPDATE durable.schedules SET occurrence_at = NULL, due_at = now() - interval '90 minutes'"
            )
            await eventually(lambda: works.row("error") == "RuntimeError: the rates are not out yet")
            assert works.row("occurrence_at <= now()")

    async def test_refusal_by_the_database_is_recorded_and_retried(self, works: Works) -> None:
        bus = works.node(made=lambda at: Tick(), headers={"a": "b"})
        async with bus:
            await works.looked_at()
            await works.tables.change(
                "ALTER TABLE durable.incoming_envelopes ADD CONSTRAINT refused CHECK (message_type <> 'recurring.tick')"
            )
            try:
                await works.miss(timedelta(seconds=1))
                await eventually(lambda: works.row("error") is not None)
            finally:
                await works.tables.change("ALTER TABLE durable.incoming_envelopes DROP CONSTRAINT refused")
            await works.tables.change("UPDATE durable.schedules SET due_at = now()")
            await eventually(lambda: len(works.handled) == 1)

    @pytest.mark.parametrize("code", ["53100", "57014"])
    async def test_schedule_refused_like_an_outage_prevents_no_other(self, works: Works, code: str) -> None:
        works.tables.execute(
            "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'no more room' USING ERRCODE = '{code}'; END $$"
        )
        works.tables.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON durable.incoming_envelopes FOR EACH ROW "
            "WHEN (convert_from(NEW.body, 'UTF8') LIKE '%%13%%') EXECUTE FUNCTION refuse()"
        )
        bus = works.node(EVERY_SECOND, Tick(13), name="a bad one")
        bus.every(EVERY_SECOND, Tick(14), name="b good one")
        try:
            async with bus:
                await eventually(lambda: works.numbers.count(14) >= 2)
        finally:
            works.tables.execute("DROP TRIGGER refuse ON durable.incoming_envelopes")
        assert set(works.numbers) == {14}


class TestOperators:
    async def test_run_schedule_runs_the_schedule_once_more(self, works: Works) -> None:
        bus = works.node()
        async with bus:
            await works.looked_at()
            due = works.row("due_at")
            assert await bus.run_schedule("ticks")
            await eventually(lambda: len(works.handled) == 1)
            assert works.row("asked_at IS NULL AND changed_by = 'works'")
            assert works.row("due_at") == due
            assert not await bus.run_schedule("tocks")

    async def test_paused_schedule_passes_over_its_occurrences(self, works: Works) -> None:
        bus = works.node()
        async with bus:
            await works.looked_at()
            await bus.pause(schedule="ticks", reason="month end")
            await works.miss(timedelta(0))  # a second ago it was not paused yet
            await eventually(lambda: works.row("due_at > now()"))
            assert works.row("last_at IS NULL")
            assert await bus.run_schedule("ticks")  # by hand all the same
            await eventually(lambda: len(works.handled) == 1)
            assert await bus.resume(schedule="ticks")
            await works.miss(timedelta(0))  # a second ago the schedule may have been paused
            await eventually(lambda: len(works.handled) == 2)

    @pytest.mark.parametrize("ends", ["by a resume", "by itself"])
    async def test_occurrences_of_a_pause_are_passed_over_when_no_node_ran(self, works: Works, ends: str) -> None:
        bus = works.node(misfire="all")
        async with bus:
            await works.looked_at()
            await bus.pause(schedule="ticks", for_=None if ends == "by a resume" else 3_600)
        await works.tables.change("UPDATE durable.circuits SET since = now() - interval '2 h'")
        await works.miss(timedelta(hours=1))
        if ends == "by a resume":
            with leftovers.transaction(works.tables.url) as conn:
                assert circuits.resume(conn, "durable", CircuitKind.SCHEDULE, "ticks").was_open
        else:
            await works.tables.change("UPDATE durable.circuits SET until = now()")
        with leftovers.transaction(works.tables.url) as conn:
            circuits.close_ended(conn, "durable")
            assert not circuits.resume(conn, "durable", CircuitKind.SCHEDULE, "ticks").was_open
        async with bus:
            await eventually(lambda: works.row("due_at > now()"))
            assert works.row("last_at IS NULL")
            assert works.tables.count("circuits") == 0
            await works.miss(timedelta(seconds=1))
            await eventually(lambda: len(works.handled) == 1)

    async def test_occurrence_missed_before_a_pause_runs_afterwards(self, works: Works) -> None:
        async with works.node():
            await works.looked_at()
        await works.miss(timedelta(hours=1))
        with leftovers.transaction(works.tables.url) as conn:
            circuits.pause(
                conn, "durable", CircuitKind.SCHEDULE, "ticks", reason="month end", actor="ada", duration=None
            )
        bus = works.node()
        async with bus:
            await eventually(lambda: works.row("declared_by") == bus.runtime.node_id)
            assert await bus.run_schedule("ticks")  # by hand all the same
            await eventually(lambda: len(works.handled) == 1)
            assert works.row("due_at < now() AND last_at IS NULL")
            assert await bus.resume(schedule="ticks")
            await eventually(lambda: len(works.handled) == 2)
            await eventually(lambda: works.row("due_at > now() AND last_at IS NOT NULL"))
            await eventually(lambda: works.tables.count("circuits") == 0)

    async def test_pause_between_missed_occurrences_passes_over_its_own(self, works: Works) -> None:
        async with works.node("0 * * * *", misfire="all"):
            await works.looked_at()
        hour = "date_trunc('hour', now())"
        await works.tables.change(
            f"UPDATE durable.schedules SET occurrence_at = {hour} - interval '5 h', due_at = {hour} - interval '5 h'"
        )
        await works.tables.change(
            "INSERT INTO durable.circuits (kind, key, reason, actor, since, until) "
            f"VALUES ('schedule', 'ticks', 'month end', 'ada', "
            f"{hour} - interval '3.5 h', {hour} - interval '1.5 h')"
        )
        now = works.tables.one(f"SELECT {hour}")
        async with works.node("0 * * * *", misfire="all"):
            await eventually(lambda: len(works.handled) >= 4)
            await eventually(lambda: works.row("due_at > now()"))
            assert works.tables.count("circuits") == 0
        occurrences = sorted(datetime.fromisoformat(occurrence) for _, occurrence in works.handled)
        assert occurrences[:4] == [now - timedelta(hours=hours) for hours in (5, 4, 1, 0)]

    async def test_pause_of_an_unknown_schedule_is_refused(self, works: Works) -> None:
        bus, other = works.node(), works.node(name="others")
        async with bus, other:
            await works.looked_at("others")
            for unknown, advice in (("tciks", "did you mean 'ticks'"), ("nightly", "as shown by scheduled list")):
                with pytest.raises(
                    InvalidSetting, match=f"schedule '{unknown}' is neither declared nor stored; .*{advice}"
                ):
                    await bus.pause(schedule=unknown)
            await bus.pause(schedule="others")
        assert works.tables.rows("SELECT key FROM durable.circuits") == ["others"]

    async def test_prolonged_pause_keeps_its_beginning(self, works: Works) -> None:
        bus = works.node()
        async with bus:
            await works.looked_at()
            await bus.pause(schedule="ticks", for_=60)
            began_at = works.tables.one("SELECT since FROM durable.circuits")
            await bus.pause(schedule="ticks", for_=3_600)
            assert works.tables.one("SELECT since FROM durable.circuits WHERE until > now() + '2 min'") == began_at
            await bus.resume(schedule="ticks")
            await bus.pause(schedule="ticks")
            assert works.tables.one("SELECT since FROM durable.circuits") > began_at

    async def test_removal_of_a_paused_schedule_removes_its_pause(self, works: Works) -> None:
        bus = works.node()
        async with bus:
            await works.looked_at()
            await bus.pause(schedule="ticks", reason="month end")
            await bus.pause(Tick, reason="month end")
            with leftovers.transaction(works.tables.url) as conn:
                assert not schedules.remove_orphan(conn, "durable", "ticks")
            assert works.tables.count("circuits") == 2
        with leftovers.transaction(works.tables.url) as conn:
            assert schedules.remove_orphan(conn, "durable", "ticks")
        assert works.tables.rows("SELECT key FROM durable.circuits") == ["recurring.tick"]

    async def test_next_occurrence_can_be_moved(self, works: Works) -> None:
        bus = works.node()
        async with bus:
            await works.looked_at()
            occurrence = works.row("occurrence_at")
            assert await bus.reschedule_next("ticks", delay=0.05)
            await eventually(lambda: len(works.handled) == 1)
            assert datetime.fromisoformat(works.handled[0][1]) == occurrence
            await eventually(lambda: works.row("occurrence_at") > occurrence)
            assert not await bus.reschedule_next("tocks", delay=1)


class TestScheduledMessages:
    async def test_cancelled_message_leaves_actor_and_reason_in_the_history(self, works: Works) -> None:
        bus = works.node("")
        async with bus:
            async with bus.unit_of_work():
                here = bus.send(Tick(1), delay=60)
                there = bus.send(Tick(2), to=PEER, delay=60)
            assert await bus.cancel(here, reason="a mistake")
            assert await bus.cancel(there)
            assert not await bus.cancel(here)
        ended = "SELECT side, outcome, error FROM durable.envelope_history ORDER BY side"
        assert works.tables.rows(ended) == [
            ("incoming", "cancelled", "cancelled by works: a mistake"),
            ("outgoing", "cancelled", "cancelled by works"),
        ]
        assert works.tables.count("incoming_envelopes") + works.tables.count("outgoing_envelopes") == 0

    async def test_delayed_message_is_made_due_or_postponed(self, works: Works) -> None:
        bus = works.node("", settings={"poll_interval": timedelta(minutes=5)})
        async with bus:
            async with bus.unit_of_work():
                now, later = (bus.send(Tick(number), delay=3_600) for number in (1, 2))
            assert await bus.run_now(now)
            await eventually(lambda: works.numbers == [1])
            assert await bus.reschedule(later, delay=0.2)
            await eventually(lambda: works.numbers == [1, 2])
            for _ in range(2):
                assert not await bus.reschedule(later, delay=1)
                assert not await bus.run_now(now)

    async def test_message_due_during_a_round_of_recovery_does_not_wait_for_the_next_poll(
        self, works: Works, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_due = "SELECT count(*) FROM durable.incoming_envelopes WHERE execution_time < now()"

        async def claim_until_it_is_due(*work: Any) -> bool:
            there_is_more = await claim_incoming(*work)
            if is_rescheduled:
                await eventually(lambda: works.tables.one(is_due))
            return there_is_more

        is_rescheduled = list[bool]()
        monkeypatch.setattr(agent, "claim_incoming", claim_until_it_is_due)
        bus = works.node("", settings={"poll_interval": timedelta(minutes=5)})
        async with bus:
            async with bus.unit_of_work():
                later = bus.send(Tick(1), delay=3_600)
            await asyncio.sleep(3)  # until the rounds of the start and of the commit are over
            is_rescheduled.append(True)
            assert await bus.reschedule(later, delay=2)
            await eventually(lambda: works.numbers == [1])

    async def test_message_of_another_process_waits_for_no_other_work_of_a_round(
        self, works: Works, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        let_go, stands = asyncio.Event(), asyncio.Event()

        async def stand(self: Recurring) -> Look:
            stands.set()
            await let_go.wait()
            return Look()

        bus = works.node("", settings={"poll_interval": timedelta(minutes=5)})
        other = works.node("", settings={"poll_interval": timedelta(minutes=5)})
        other.mode = "send-only"
        async with bus, other:
            await asyncio.sleep(1)  # until the rounds of the start are over
            monkeypatch.setattr(Recurring, "poll", stand)
            monkeypatch.setattr(dispatching, "lanes_of", lambda _: ANYWHERE)  # as of what takes a round to be found
            async with other.unit_of_work():
                other.send(Tick(1))
            await eventually(lambda: works.numbers == [1])
            await stands.wait()
            let_go.set()

    async def test_message_cannot_be_rescheduled_beyond_its_deadline_or_the_dedupe_window(self, works: Works) -> None:
        bus = works.node("")
        async with bus:
            async with bus.unit_of_work():
                urgent = bus.send(Tick(1), delay=60, deliver_by=timedelta(hours=1))
                far = bus.send(Tick(2), to=PEER, delay=60)
            for message_id, delay in ((urgent, timedelta(hours=1)), (far, timedelta(days=7))):
                with pytest.raises(InvalidMessage, match="would expire, or be too old"):
                    await bus.reschedule(message_id, delay=delay)
            with pytest.raises(InvalidMessage, match="one of them"):
                await bus.reschedule(far)
            with pytest.raises(InvalidMessage, match="aware datetime"):
                await bus.reschedule(far, at=datetime(2030, 1, 1))
        assert works.tables.one(
            "SELECT max(execution_time) < now() + interval '2 minutes' FROM durable.incoming_envelopes"
        )

    async def test_message_being_handled_cannot_be_cancelled_or_rescheduled(self, works: Works) -> None:
        bus = works.node("")
        async with bus:
            async with bus.unit_of_work():
                message_id = bus.send(Tick(1), delay=60)
            await works.tables.change("UPDATE durable.incoming_envelopes SET execution_time = NULL, owner_id = 999")
            assert not await bus.cancel(message_id)
            assert not await bus.reschedule(message_id, delay=1)
            assert works.tables.count("incoming_envelopes") == 1
