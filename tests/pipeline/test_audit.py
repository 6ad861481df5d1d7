"""The audit: what is planted among good history is found, all of it and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import ledger, lost_lives
from durable.pipeline.audit import Question, Verdict, audit, audit_here
from durable.pipeline.choosing import Choice, choose
from durable.pipeline.lake import Lake
from durable.pipeline.lake_marks import Whole
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.many_suspects import unbalanced
from durable.pipeline.matching import FINDINGS, Edges
from durable.pipeline.rows import records
from durable.pipeline.spans import Gap, Span
from tests.support.audits import numbered, own, own_service, part
from tests.support.command import Agent
from tests.support.lakes import SHOP, at, fill, frame, handled, letter, many, message_id, sent, table

DAY: Final = 86_400
NOTHING = dict.fromkeys(FINDINGS, 0)
Rows = Sequence[Mapping[str, Any]]
Findings = set[tuple[str, int]]
"""Kind of each, and number of its message."""


# ---------------------------------------------------------------- over lakes

LOST, TWICE, ALIEN, LATE = (1_111, 50_000, 999_000), (1_112, 222_222), (1_113, 500_000, 700_000, 888_888), (7, 8, 9)


def among(numbers: np.ndarray, folder: Path) -> tuple[Lake, Lake]:
    """These messages sent by the shop and handled by billing, and what was planted among them."""
    again = [handled(0, id=message_id(n), sent_at=at(n / 1_000), finished_at=at(n / 1_000 + 60)) for n in TWICE]
    sent_slowly = [sent(n, sent_at=at(500), finished_at=at(501)) for n in LATE]
    handled_late = [handled(n, sent_at=at(500), finished_at=at(2_000)) for n in LATE]
    sends, receipts = np.setdiff1d(numbers, ALIEN), np.setdiff1d(numbers, LOST)
    return (
        fill(Lake(str(folder / "sender")), many(sends, "outgoing"), table(sent_slowly)),
        fill(Lake(str(folder / "receiver")), many(receipts, "incoming"), table([*again, *handled_late])),
    )


def test_audit_of_a_million_messages_finds_exactly_the_planted_losses(spark: SparkSession, tmp_path: Path) -> None:
    sender, receiver = among(np.arange(1_000, 1_001_000), tmp_path)
    out = str(tmp_path / "findings")
    verdict = audit(spark, [sender], [receiver], Question(late_after=timedelta(minutes=15)), out=out)
    assert verdict.failed
    assert verdict.counts == NOTHING | {"lost": 3, "twice": 2, "alien": 4, "late": 3}
    shown = {(row["finding"], row["id"]) for row in verdict.examples}
    planted = {"lost": LOST, "twice": TWICE, "alien": ALIEN, "late": LATE}
    assert shown == {(kind, str(message_id(n))) for kind, numbers in planted.items() for n in numbers}
    written = spark.read.parquet(f"file://{out}")
    assert {(row.finding, row.id) for row in written.collect()} == shown


def test_slices_of_files_and_a_shuffle_suspect_the_same_ids(spark: SparkSession, tmp_path: Path) -> None:
    """And none of what is in order: events at several places, local messages."""
    two = ("tcp://billing:1", "tcp://shipping:1")
    rows = [
        *(sent(n, address=address) for n in (1, 2, 3) for address in two),
        *(handled(1), handled(1, service="shipping")),  # in order
        *(handled(2), handled(2)),  # twice here, never there
        handled(3),
        *(handled(4, service=SHOP, address="local"), sent(4), handled(4)),
        *(handled(5, service=SHOP, address="local"), handled(5, service=SHOP, address="local")),
        *(handled(6, service=SHOP, address="local"), sent(6)),
        handled(7, service=SHOP, address="local"),  # in order
        *(sent(8), handled(8, outcome="dead-lettered"), handled(8)),
        *(sent(9), sent(9), handled(9)),
        *(sent(10), handled(10)),  # in order
        *(sent(11, outcome="expired"), handled(12)),
        *(sent(14), handled(14, sent_at=at(9 * DAY))),  # two uses of one key
        *(sent(15), sent(15, sent_at=at(9 * DAY)), handled(15), handled(15, service="shipping")),
        *(sent(13), handled(13), *[handled(13, outcome="expired")] * (1 << 14)),  # so many that a sum comes round
    ]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows[::2]), table(rows[1::2]))
    history = frame(spark, rows)
    shuffled = unbalanced(*(history.where(f"side = '{side}'") for side in ("outgoing", "incoming")))
    sources = [*ledger.sources([lake], "outgoing"), *ledger.sources([lake], "incoming")]
    sliced, here = ledger.many_suspects(spark, sources, Edges()), ledger.suspects(ledger.here, sources, Edges(), None)
    assert sliced is not None
    assert here is not None
    for found in (*([row["id"] for row in records(each)] for each in (shuffled, sliced)), here):
        assert sorted(map(int.from_bytes, found)) == [2, 3, 5, 6, 8, 9, *range(11, 16)]
    quickly = ledger.suspects(ledger.on(spark), sources, Edges(), 1_000)
    assert quickly is not None
    assert sorted(map(int.from_bytes, quickly)) == [*range(1, 7), 8, 9, *range(11, 16)]
    assert ledger.suspects(ledger.here, sources, Edges(), 8) is None


def test_lake_may_hold_both_sides(spark: SparkSession, tmp_path: Path) -> None:
    numbers = np.arange(1_000)
    lake = fill(Lake(str(tmp_path / "lake")), many(numbers, "outgoing"), many(numbers, "incoming"))
    verdict = audit(spark, [lake], [lake], Question())
    assert (verdict.counts, verdict.failed) == (NOTHING, False)
    assert [(row["service"], row["outcome"], row["count"]) for row in verdict.totals] == [
        ("billing", "handled", 1_000),
        ("shop", "sent", 1_000),
    ]


def test_message_too_new_for_the_archive_of_its_receiver_is_open(spark: SparkSession, tmp_path: Path) -> None:
    sender = fill(Lake(str(tmp_path / "sender")), table([sent(1), sent(2, finished_at=datetime.now(UTC))]))
    receiver = fill(Lake(str(tmp_path / "receiver")), table([handled(0)]))
    verdict = audit(spark, [sender], [receiver], Question(since=at(1)))
    assert verdict.counts == NOTHING | {"lost": 1, "open": 1}


def test_a_lake_without_history_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no history; fill it with"):
        audit(spark, [Lake(str(tmp_path))], [Lake(str(tmp_path))], Question())


# ---------------------------------------------------------------- few rows, without Spark


GOOD: Rows = [sent(1, deliver_by=at(9)), handled(1, deliver_by=at(9)), sent(2), handled(2), handled(3, address="local")]


def test_few_rows_are_judged_without_spark(spark: SparkSession, tmp_path: Path) -> None:
    lake = fill(Lake(str(tmp_path / "lake")), table(GOOD[::2]), table(GOOD[1::2]))
    for question in (
        Question(),
        Question(since=at(1.5), until=at(2.5)),
        Question(late_after=timedelta(milliseconds=25)),
        Question(archived_until=at(99)),
    ):
        seen = audit_here([lake], [lake], question)
        assert (seen, seen.counts) == (audit(spark, [lake], [lake], question), NOTHING)
    assert audit_here([lake], [lake], Question(late_after=timedelta(milliseconds=24))).counts["late"] == 3
    with pytest.raises(InvalidSetting, match="no history; fill it with"):
        audit_here([lake], [Lake(str(tmp_path))], Question())


FLAWS: Mapping[str, Rows] = {
    "lost": [sent(8)],
    "twice": [sent(8), handled(8), handled(8, finished_at=at(9))],
    "twice of a local one": [handled(8, address="local"), handled(8, address="local", finished_at=at(9))],
    "alien": [handled(8)],
    "late": [sent(8, deliver_by=at(8)), handled(8, deliver_by=at(8))],
    "one of two copies lost": [sent(8), sent(8, address="tcp://shipping:1"), handled(8)],
    "dead-lettered": [sent(8), handled(8, outcome="dead-lettered")],
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_is_found_in_its_period_alone(tmp_path: Path, flaw: str) -> None:
    lake = fill(Lake(str(tmp_path / "lake")), table([*GOOD, *FLAWS[flaw]]))
    verdict = audit_here([lake], [lake], Question(settle=timedelta(0)))
    found = {kind: count for kind, count in verdict.counts.items() if count}
    assert found == {"dead-lettered": {}, "one of two copies lost": {"lost": 1}}.get(flaw, {flaw.split()[0]: 1})
    assert audit_here([lake], [lake], Question(until=at(5))).counts == NOTHING


def test_findings_are_written_where_out_says(tmp_path: Path) -> None:
    rows = [own(case, row) for case, flaw in enumerate(FLAWS.values()) for row in flaw]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows))
    verdict = audit_here([lake], [lake], Question(settle=timedelta(0)), out=str(tmp_path / "found"))
    written = pq.read_table(tmp_path / "found").to_pylist()
    assert sorted(written, key=str) == sorted(verdict.examples, key=str)
    assert len(written) == sum(verdict.counts.values()) > 4
    with pytest.raises(InvalidSetting, match="is there already; name a new folder"):
        audit_here([lake], [lake], Question(), out=str(tmp_path / "found"))


def test_copies_of_a_lake_add_no_findings(spark: SparkSession, tmp_path: Path) -> None:
    rows = [own(case, row) for case, flaw in enumerate(FLAWS.values()) for row in [*GOOD, *flaw]]
    lakes = [fill(Lake(str(tmp_path / name)), table(rows)) for name in ("own", "copy", "another copy")]
    question = Question(settle=timedelta(0), late_after=timedelta(milliseconds=24), example_count=1_000)
    alone = audit(spark, lakes[:1], lakes[:1], question)
    assert all(alone.counts[kind] for kind in ("lost", "twice", "alien", "late"))
    copied = audit(spark, lakes, lakes[1:], question)
    assert (copied.counts, copied.examples) == (alone.counts, alone.examples)
    assert audit_here(lakes, lakes[1:], question) == copied


SEEDS = range(8)


def random_rows(seed: int) -> Rows:
    """Rows of good messages, some of which are left out, doubled or slow, by the seed."""
    random, rows = np.random.default_rng(seed), list[Mapping[str, Any]]()
    for number in range(1, 30):
        good = [sent(number), handled(number, finished_at=at(number + random.choice([0.02, 30])))]
        rows += good if random.random() < 0.99 else [good[random.integers(2)]] * int(random.integers(0, 3))
    return [own(seed, row) for row in rows]


@pytest.fixture(scope="module")
def random_lakes(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Lake]:
    """A lake for each seed."""
    folder = tmp_path_factory.mktemp("random")
    rows = {seed: random_rows(seed) for seed in SEEDS}
    return [fill(Lake(str(folder / f"{seed}")), table(rows[seed][::2]), table(rows[seed][1::2])) for seed in SEEDS]


SLOW: Mapping[bool, Question] = {
    odd: Question(settle=timedelta(0), late_after=timedelta(seconds=60 if odd else 10), example_count=1_000)
    for odd in (False, True)
}
"""Of even and of odd seeds."""


@pytest.fixture(scope="module")
def random_verdicts(spark: SparkSession, random_lakes: Sequence[Lake]) -> Mapping[bool, Verdict]:
    return {odd: audit(spark, random_lakes[odd::2], random_lakes[odd::2], SLOW[odd]) for odd in SLOW}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_are_judged_alike_with_and_without_spark(
    random_lakes: Sequence[Lake], random_verdicts: Mapping[bool, Verdict], seed: int
) -> None:
    odd = seed % 2 == 1
    verdict = part(seed, random_verdicts[odd])
    assert audit_here([random_lakes[seed]], [random_lakes[seed]], SLOW[odd]) == verdict


WAYS = {"few": (100_000, 32), "many ids, in slices": (0, 32), "many ids, by a shuffle": (0, 0)}
"""How many rows one process looks at, and how many slices there may be."""


@pytest.mark.parametrize("way", WAYS)
def test_audits_of_few_and_of_many_suspects_judge_alike(
    spark: SparkSession, random_lakes: Sequence[Lake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of rows that are in two lakes, some in lost lives, with letters, one of which has no id."""
    flaws = [own(case, row) for case, flaw in enumerate(FLAWS.values()) for row in [*GOOD, *flaw]]
    odd = fill(Lake(str(tmp_path / "odd")), table([*flaws, *(own(99, row) for row in (sent(1), sent(2), handled(3)))]))
    fill(odd, table([own(99, letter(1)), letter(7, id=None)], "dead_letters"), of="dead_letters")
    whose = Whose(own_service(99, "billing"), "b")
    lost_lives.write(odd, "history", whose, table([own(99, handled(3))]))
    lost_lives.write(odd, "dead_letters", whose, table([own(99, letter(2))], "dead_letters"))
    lakes = [*random_lakes, random_lakes[0], odd]
    question = SLOW[False]
    here = audit_here(lakes, lakes, question)
    assert all(here.counts[kind] for kind in ("lost", "twice", "alien", "late"))
    most, slices = WAYS[way]
    monkeypatch.setattr("durable.pipeline.audit._FEW", most)
    monkeypatch.setattr("durable.pipeline.ledger.MOST_SLICES", slices)
    out = str(tmp_path / "findings")
    assert audit(spark, lakes, lakes, question, out=out) == here
    assert len(pq.read_table(out)) == len(here.examples)


@pytest.mark.parametrize(("window", "code"), [("7d", 0), ("2d", 1)])
def test_audit_tells_uses_of_a_key_apart_by_the_dedupe_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], window: str, code: int
) -> None:
    """The second message of the key, three days later, is a repeat of the first, or lost."""
    later = {"sent_at": at(3 * DAY), "finished_at": at(3 * DAY + 1)}
    rows = [sent(1), handled(1), sent(1, **later), sent(2), handled(2)]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows))
    monkeypatch.setenv("DURABLE_DEDUPE_WINDOW", window)
    agent = Agent(tmp_path, monkeypatch, capsys)
    ended = agent("pipeline", "audit", "--json", "--sender", lake.url, "--receiver", lake.url, "--settle", "0s")
    assert (ended.code, json.loads(ended.out)["counts"]["lost"]) == (code, code)


# ---------------------------------------------------------------- histories that end at different times


class Stay(NamedTuple):
    """Rows of a service in a lake, and from when to when its history is whole there, but for the gaps."""

    lake: str
    service: str
    rows: Rows
    begin: float
    until: float | None
    """None where the archive could not tell."""
    gaps: Sequence[tuple[float, float]] = ()
    of: Sequence[LakeTable] = ("history", "dead_letters")
    """The tables that have the gaps."""


class Archives(NamedTuple):
    """Services that were archived at different times, into lakes of their own or some that they share."""

    stays: Sequence[Stay]
    findings: Findings
    """What is found, but for what is open."""


def written(folder: Path, cases: Mapping[str, Archives]) -> list[Lake]:
    """The lakes that all cases share."""
    stays = [(number, stay) for number, case in enumerate(cases.values()) for stay in case.stays]
    lakes = []
    for name in {stay.lake: stay for _, stay in stays}:
        lake = Lake(str(folder / name))
        of_lake = [(number, stay) for number, stay in stays if stay.lake == name]
        fill(lake, table([row for number, stay in of_lake for row in archived_rows(number, stay)]))
        lake.create("dead_letters")
        for number, stay in of_lake:
            note_span(lake, own_service(number, stay.service), stay)
        lakes.append(lake)
    return lakes


def archived_rows(case: int, stay: Stay) -> Rows:
    rows = [own(case, {**row, "service": stay.service}) for row in stay.rows]
    return [{**row, "database": f"{row['service']}-a"} for row in rows]


def note_span(lake: Lake, service: str, stay: Stay) -> None:
    gaps, database = tuple(Gap(at(first), at(end)) for first, end in stay.gaps), f"{service}-a"
    for name in SOURCES:
        until = None if stay.until is None else at(stay.until)
        whole = Whole(Whose(service, database), Span(at(stay.begin), until, gaps if name in stay.of else ()))
        lake.commit(name, [], app_id=database, low=0, high=1, whole=whole)


def judged(
    spark: SparkSession, folder: Path, cases: Mapping[str, Archives], settle: float = 1, since: datetime | None = None
) -> dict[str, Findings]:
    """What one audit finds among each of these, with and without Spark, which takes them for many."""
    question = Question(settle=timedelta(seconds=settle), since=since, example_count=10_000)
    lakes = written(folder, cases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("durable.pipeline.audit._FEW", 0)
        verdict = audit(spark, lakes, lakes, question)
    assert audit_here(lakes, lakes, question) == verdict
    found = {}
    for number, name in enumerate(cases):
        own_part = part(number, verdict)
        assert own_part.failed == any(own_part.counts[kind] for kind in ("lost", "twice"))
        ids = {(row["finding"], numbered(row["id"])[1]) for row in own_part.examples}
        found[name] = {(kind, number) for kind, number in ids if kind != "open"}
    return found


TO = {"billing": "tcp://billing:2302", "shipping": "tcp://shipping:2302"}
LAKES = [("one", "one", "one"), ("a", "b", "c"), ("a", "a", "b")]


HISTORIES = {
    "all whole": ((0, 1_000), (0, 1_000)),
    "one held back": ((0, 500), (0, 1_000)),
    "one begins late": ((500, 1_000), (0, 1_000)),
    "both": ((300, 600), (400, 1_000)),
}
"""From when to when billing and shipping were archived."""


def in_own_histories(lakes: tuple[str, ...], billing: tuple[int, int], shipping: tuple[int, int]) -> Archives:
    """Every fifth message was lost, and of what a service was sent before it began to archive there is no trace."""
    spans, planted = {"billing": billing, "shipping": shipping}, set()
    sends: list[Mapping[str, Any]] = []
    receipts: dict[str, list[Mapping[str, Any]]] = {"billing": [], "shipping": []}
    for number in range(1, 1_000, 7):
        for offset, (service, (begin, until)) in enumerate(spans.items()):
            n = number + offset
            sends.append(sent(n, address=TO[service]))
            is_lost = number % 5 == 0
            if n < begin:
                planted.add(("unarchived", n))
            elif is_lost and n < until - 1.01:
                planted.add(("lost", n))
            if not is_lost and begin <= n and n + 0.025 < until:
                receipts[service].append(handled(n, service=service))
    stays = [
        Stay(lakes[0], SHOP, sends, 0, 1_000),
        Stay(lakes[1], "billing", receipts["billing"], *billing),
        Stay(lakes[2], "shipping", receipts["shipping"], *shipping),
    ]
    return Archives(stays, planted)


IN_OWN_HISTORIES = {
    f"{name}, lakes {' '.join(lakes)}": in_own_histories(lakes, *HISTORIES[name])
    for name, lakes in product(HISTORIES, LAKES)
}


def with_missing_copy(finding: str, *seen_at: str) -> Archives:
    """An event went to billing, which has a gap, and to shipping, which has none; these have seen it."""
    known = [sent(n, address=TO[service]) for n, service in ((1, "billing"), (2, "shipping"))]
    event = [sent(350, address=address) for address in TO.values()]
    receipts = {service: [handled(n, service=service)] for n, service in ((1, "billing"), (2, "shipping"))}
    for service in seen_at:
        receipts[service].append(handled(350, service=service))
    stays = [
        Stay("one", SHOP, [*known, *event], 0, 1_000),
        Stay("one", "billing", receipts["billing"], 0, 1_000, gaps=[(300, 400)]),
        Stay("one", "shipping", receipts["shipping"], 0, 1_000),
    ]
    return Archives(stays, {(finding, 350)})


MISSING_COPIES = {
    "copy seen nowhere is unknown": with_missing_copy("unarchived"),
    "copy not seen by the service without a gap is lost": with_missing_copy("lost", "billing"),
    "copy not seen by the service with the gap is unknown": with_missing_copy("unarchived", "shipping"),
}


def in_two_lakes(second: tuple[float, float], finding: str) -> Archives:
    stays = [
        Stay("one", SHOP, [sent(350), sent(100), sent(800)], 0, 1_000),
        Stay("old", "billing", [handled(100)], 0, 300),
        Stay("new", "billing", [handled(800)], *second),
    ]
    return Archives(stays, {(finding, 350)})


FILLED_GAP = [
    Stay("one", SHOP, [sent(350), sent(100), sent(800), sent(500)], 0, 1_000),
    Stay("old", "billing", [handled(100, xid=1)], 0, 1_000, gaps=[(300, 400), (700, 900)]),
    Stay("new", "billing", [handled(500, xid=2)], 200, 600),
]
SENT_TO_BOTH = [sent(n, xid=n) for n in range(1, 51)]
HANDLED_IN_BOTH = [handled(n, xid=n) for n in range(1, 51) if n != 17]
SAME_ROWS = [
    Stay(lake, service, rows[:last], 0, last)
    for lake, last in (("old", 30), ("new", 1_000))
    for service, rows in ((SHOP, SENT_TO_BOTH), ("billing", HANDLED_IN_BOTH))
]
TWO_LAKES = {
    "second lake begins before the first ends": in_two_lakes((300, 1_000), "lost"),
    "time between two lakes of one database is a gap": in_two_lakes((400, 1_000), "unarchived"),
    "lake without a gap fills the gap of another": Archives(FILLED_GAP, {("lost", 350), ("unarchived", 800)}),
    "rows of an old and a new lake are the same rows": Archives(SAME_ROWS, {("lost", 17)}),
}


WITHOUT_END = {
    side: Archives(
        [
            Stay(lakes[0], SHOP, [sent(100), *of_shop], 0, None if side == "sender" else 1_000),
            Stay(lakes[1], "billing", [handled(100), *of_billing], 0, None if side == "receiver" else 1_000),
        ],
        set(),
    )
    for side, of_shop, of_billing, lakes in (
        ("sender", [], [handled(500)], LAKES[0]),
        ("receiver", [sent(500)], [], LAKES[1]),
    )
}
"""One side has not archived yet what the other one has."""


@pytest.fixture(scope="module")
def judged_at_once(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Findings]:
    """One audit of all cases in which messages settle within a second."""
    return judged(
        spark, tmp_path_factory.mktemp("archives"), IN_OWN_HISTORIES | MISSING_COPIES | TWO_LAKES | WITHOUT_END
    )


@pytest.mark.parametrize("name", IN_OWN_HISTORIES)
def test_audit_judges_each_service_within_its_own_history(judged_at_once: Mapping[str, Findings], name: str) -> None:
    planted = IN_OWN_HISTORIES[name].findings
    assert len(planted) > 10
    assert judged_at_once[name] == planted


@pytest.mark.parametrize("name", MISSING_COPIES)
def test_missing_copy_of_an_event_is_unknown_only_for_the_service_with_the_gap(
    judged_at_once: Mapping[str, Findings], name: str
) -> None:
    assert judged_at_once[name] == MISSING_COPIES[name].findings


@pytest.mark.parametrize("name", TWO_LAKES)
def test_two_lakes_of_one_database_are_judged_as_one(judged_at_once: Mapping[str, Findings], name: str) -> None:
    assert judged_at_once[name] == TWO_LAKES[name].findings


@pytest.mark.parametrize("side", WITHOUT_END)
def test_history_without_an_end_is_not_judged(judged_at_once: Mapping[str, Findings], side: str) -> None:
    assert judged_at_once[side] == WITHOUT_END[side].findings


GAPS: Mapping[str, Sequence[tuple[float, float]]] = {
    "none": (),
    "one": ((300, 400),),
    "two": ((200, 250), (700, 710)),
    "two that touch": ((300, 350), (350, 420)),
    "at the beginning": ((-50, 60),),
    "at the end": ((500, 2_000),),
}
LATER = 8.0
"""By so many seconds a message is handled after it was acknowledged, and so long the audit lets messages settle."""


def lies_in(gaps: Sequence[tuple[float, float]], moment: float) -> bool:
    return any(first <= moment < end for first, end in gaps)


def may_lie_in(gaps: Sequence[tuple[float, float]], sent_at: float, seen_at: float) -> bool:
    """Of a row whose time is unknown: it is of after `sent_at`, and not much later than the other side saw it."""
    return any(seen_at >= first - LATER and sent_at < end for first, end in gaps)


def with_gaps(side: str, shape: str, lakes: tuple[str, ...], until: float) -> Archives:
    """Every fifth message was lost; of the others each side has its row, unless that lies in a gap or is yet to come.

    Billing's history ends at `until`, and shipping's has no gap.
    """
    of_shop, of_billing = (GAPS[shape] if side in (each, "both") else () for each in ("sender", "receiver"))
    receivers = {"billing": (of_billing, until), "shipping": ((), 1_000.0)}
    expected: Findings = set()
    sends: list[Mapping[str, Any]] = []
    receipts: dict[str, list[Mapping[str, Any]]] = {"billing": [], "shipping": []}
    for number, (service, (gaps, end)) in product(range(1, 990, 7), receivers.items()):
        n = number + (service == "shipping")
        acknowledged, ended = n + 0.01, n + 0.01 + LATER
        has_sent = not lies_in(of_shop, acknowledged)
        has_received = n % 5 != 0 and ended < end and not lies_in(gaps, ended)
        if has_sent:
            sends.append(sent(n, address=TO[service]))
        if has_received:
            receipts[service].append(handled(n, service=service, finished_at=at(ended)))
        if has_sent and not has_received and acknowledged < end - LATER:
            expected.add(("unarchived" if may_lie_in(gaps, n, acknowledged) else "lost", n))
        if has_received and not has_sent and ended < 1_000 - LATER:
            expected.add(("unarchived", n))
    stays = [
        Stay(lakes[0], SHOP, sends, 0, 1_000, gaps=of_shop),
        Stay(lakes[1], "billing", receipts["billing"], 0, until, gaps=of_billing),
        Stay(lakes[2], "shipping", receipts["shipping"], 0, 1_000),
    ]
    return Archives(stays, expected)


WITH_GAPS = {
    (side, shape): with_gaps(side, shape, LAKES[number % 3], (1_000.0, 600.0)[number % 2])
    for number, (side, shape) in enumerate(product(("sender", "receiver", "both"), GAPS))
}


@pytest.fixture(scope="module")
def judged_with_gaps(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Findings]:
    cases = {f"{side} {shape}": archives for (side, shape), archives in WITH_GAPS.items()}
    return judged(spark, tmp_path_factory.mktemp("gaps"), cases, settle=LATER)


@pytest.mark.parametrize(("side", "shape"), WITH_GAPS)
def test_audit_separates_rows_in_a_gap_from_lost_rows(
    judged_with_gaps: Mapping[str, Findings], side: str, shape: str
) -> None:
    expected = WITH_GAPS[side, shape].findings
    assert len([kind for kind, _ in expected if kind == "lost"]) > 5
    assert bool(GAPS[shape]) == any(kind == "unarchived" for kind, _ in expected)
    assert judged_with_gaps[f"{side} {shape}"] == expected


@pytest.mark.parametrize("of", [("history",), ("dead_letters",)])
def test_audit_knows_the_gaps_of_either_table(spark: SparkSession, tmp_path: Path, of: Sequence[LakeTable]) -> None:
    """Each alone: no receipt tells where the address leads, so that the gap is that of every receiver."""
    stays = [
        Stay("one", SHOP, [sent(150), sent(350), sent(450)], 0, 1_000),
        Stay("one", "billing", [handled(1)], 0, 1_000, gaps=[(300, 400)], of=of),
    ]
    archives = Archives(stays, {("lost", 150), ("unarchived", 350), ("lost", 450)})
    assert judged(spark, tmp_path, {"alone": archives}, since=at(100)) == {"alone": archives.findings}


def test_gaps_of_a_lake_stay_through_later_commits(tmp_path: Path) -> None:
    lake, whose = Lake(str(tmp_path)), Whose("billing", "billing-a")
    lake.create("history")
    commits: list[tuple[float, float, list[tuple[float, float]]]] = [
        (0, 10, [(3, 4)]),
        (5, 20, []),
        (0, 30, [(12, 14), (3.5, 6)]),
        (0, 40, [(14, 15), (1, 2)]),
    ]
    for low, (begin, until, gaps) in enumerate(commits):
        missing = tuple(Gap(at(first), at(end)) for first, end in gaps)
        span = Span(at(begin), at(until), missing)
        lake.commit("history", [], app_id="a", low=low, high=low + 1, whole=Whole(whose, span))
    found = [(1, 2), (3, 6), (12, 15)]
    assert lake.span("history", whose) == Span(at(0), at(40), tuple(Gap(at(first), at(end)) for first, end in found))
    assert lake.span("history", Whose("billing", "billing-b")) == Span()


def test_letters_of_two_databases_of_one_service_are_told_apart(spark: SparkSession, tmp_path: Path) -> None:
    ours = [letter(n, database="billing-a") for n in range(1, 11)]
    resolved = {"resolved_at": at(99), "resolution": "discarded", "xid": 2}
    theirs = [letter(n, database="billing-b") | state for n in range(1, 11) for state in ({}, resolved)]
    lake = fill(Lake(str(tmp_path / "lake")), table([*ours, *theirs], "dead_letters"), of="dead_letters")
    chosen = choose(spark, lake, Choice(table="dead_letters"))
    assert {(row["database"], row["letter_id"]) for row in records(chosen)} == {("billing-a", n) for n in range(1, 11)}


# ---------------------------------------------------------------- periods of messages that are published again

HALF_DAY: Final = 43_200
PUBLISHED: Final = 400
"""Messages of the random lakes, half a day of which the ids come from."""


def dated(second: float, number: int) -> UUID:
    """An id of version 7."""
    return UUID(int=int(at(second).timestamp() * 1_000) << 80 | 7 << 76 | 2 << 62 | number)


class Published(NamedTuple):
    """Rows of random messages in all of their shapes, and those that are of lost lives."""

    rows: Rows
    letters: Rows
    lost_rows: Rows
    lost_letters: Rows


def published_again() -> Published:
    """Messages that were sent once or more under an id, over a week: at one time to several places, or later again
    there or elsewhere, also when the key of the id was freed; of each some copies came to an end, once or twice, at the
    first time or any other, and some sendings or ends are of lost lives. Some ids carry their time.
    """
    random, of_each = np.random.default_rng(2031), [list[dict[str, Any]]() for _ in Published._fields]

    def put(to: list[dict[str, Any]], lost: list[dict[str, Any]], row: dict[str, Any], often: float = 0.05) -> None:
        to.append({**row, "database": f"{row['service']}-a"})
        if random.random() < often:
            lost.append(to[-1])

    rows, letters, lost_rows, lost_letters = of_each
    for number in range(PUBLISHED):
        first = number / PUBLISHED * 12 * HALF_DAY
        again = random.choice([0, 0, 0, 0.9, HALF_DAY, 5 * HALF_DAY, 12 * HALF_DAY, 15 * HALF_DAY, 21 * HALF_DAY], 3)
        id_ = message_id(number) if number % 5 else dated(first, number)
        for time in sorted({0, *again.tolist()}):
            moment = {"id": id_, "sent_at": at(first + time)}
            for place in ("billing", "shipping")[: random.choice([1, 1, 1, 2])]:
                address = f"{place}:{random.choice([1, 1, 1, 2])}"
                if number % 12:
                    outcome = "expired" if random.random() < 0.05 else "sent"
                    acknowledged = at(first + time + random.choice([0.01, HALF_DAY]))
                    shown = {"address": f"tcp://{address}", "outcome": outcome, "finished_at": acknowledged}
                    put(rows, lost_rows, sent(number, **moment, **shown), often=0.05 if number % 12 > 1 else 1)
                if random.random() < (0.8 if time == 0 else 0.2):
                    ended = at(first + time + random.choice([0.02, 2 * HALF_DAY]))
                    put(rows, lost_rows, handled(number, **moment, service=place, finished_at=ended))
                elif random.random() < 0.1:
                    put(letters, lost_letters, letter(number, **moment, service=place, failed_at=at(first + time)))
    return Published(*of_each)


@pytest.fixture(scope="module")
def lake_published_again(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    rows, letters, lost_rows, lost_letters = published_again()
    lake = fill(Lake(str(tmp_path_factory.mktemp("again"))), table(rows[::2]), table(rows[1::2]))
    fill(lake, table(letters, "dead_letters"), of="dead_letters")
    lost: Mapping[LakeTable, Rows] = {"history": lost_rows, "dead_letters": lost_letters}
    for of, lost_of in lost.items():
        for service in {row["service"] for row in lost_of}:
            whose = Whose(service, f"{service}-a")
            lost_lives.write(lake, of, whose, table([row for row in lost_of if row["service"] == service], of))
    return lake


UNTRIED = {"overdue", "late", "open", "unarchived"}
PERIODS = {
    "all": (None, None),
    "last days": (6.5, None),
    "first days": (None, 6.5),
    "two days": (4.25, 8.75),
    "a moment": (6, 6.01),
}
"""Half days that are asked for."""


def of_period(period: str) -> Question:
    since, until = (None if each is None else at(each * HALF_DAY) for each in PERIODS[period])
    return Question(since=since, until=until, settle=timedelta(0), example_count=10_000)


@pytest.mark.parametrize("period", PERIODS)
def test_finding_belongs_to_the_period_of_the_first_sending(lake_published_again: Lake, period: str) -> None:
    """And is the same one, whatever else of the message lies before the period or after it."""
    lakes, question = [lake_published_again], of_period(period)
    whole = audit_here(lakes, lakes, of_period("all"))
    assert {*NOTHING} - {kind for kind, count in whole.counts.items() if count > 3} == UNTRIED
    low, high = question.since or at(0), question.until or at(1e9)
    expected = [row for row in whole.examples if low <= row["sent_at"] < high]
    assert sorted(audit_here(lakes, lakes, question).examples, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("way", WAYS)
def test_messages_published_again_are_judged_alike_with_and_without_spark(
    spark: SparkSession, lake_published_again: Lake, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    lakes, question = [lake_published_again], of_period("two days")
    here = audit_here(lakes, lakes, question)
    most, slices = WAYS[way]
    monkeypatch.setattr("durable.pipeline.audit._FEW", most)
    monkeypatch.setattr("durable.pipeline.ledger.MOST_SLICES", slices)
    assert audit(spark, lakes, lakes, question) == here


def test_totals_of_a_service_are_sorted_by_its_databases(spark: SparkSession, tmp_path: Path) -> None:
    rows = [handled(number, database=f"billing-{number * 7 % 10}") for number in range(10)]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows[::2]), table(rows[1::2]))
    here = audit_here([lake], [lake], Question())
    assert [row["database"] for row in here.totals] == [f"billing-{number}" for number in range(10)]
    assert audit(spark, [lake], [lake], Question()).totals == here.totals


# ---------------------------------------------------------------- tables that are gone


def with_letters(place: Path, letters: Rows, runs: int = 2) -> Lake:
    """A lake as so many archive runs leave it: each brings history first, and dead letters then."""
    lake = Lake(str(place))
    for run in range(runs):
        fill(lake, table([sent(run), handled(run)]))
        fill(lake, table(letters if run == 0 else [], "dead_letters"), of="dead_letters")
    return lake


GONE = {"folder": "dead_letters", "log": "dead_letters/_delta_log", "history's log": "history/_delta_log"}


@pytest.mark.parametrize("what", GONE)
@pytest.mark.parametrize("letters", [[], [letter(1)]], ids=["no letters", "a letter"])
def test_audit_names_the_lost_table_of_a_lake(tmp_path: Path, what: str, letters: Rows) -> None:
    lake = with_letters(tmp_path / "lake", letters)
    assert audit_here([lake], [lake], Question()).counts == NOTHING
    shutil.rmtree(tmp_path / "lake" / GONE[what])
    name = GONE[what].partition("/")[0]
    with pytest.raises(
        DurableError, match=f"lake: .*/lake/{name} is gone, or its _delta_log; put it back from a backup"
    ):
        audit_here([lake], [lake], Question())
    if name == "dead_letters":
        assert audit_here([lake], [with_letters(tmp_path / "whole", letters)], Question()).counts == NOTHING
        with pytest.raises(DurableError, match="dead_letters is gone"):
            lake.require("dead_letters")


@pytest.mark.parametrize("runs", [1, 2])
def test_lake_without_an_archive_of_dead_letters_is_audited(tmp_path: Path, runs: int) -> None:
    lake = Lake(str(tmp_path / "lake"))
    for run in range(runs):
        fill(lake, table([sent(run), handled(run)]))
    assert audit_here([lake], [lake], Question()).counts == NOTHING


# ---------------------------------------------------------------- files of something else

FOREIGN: Mapping[str, Any] = {
    "id of text": ("id", lambda value: value.hex().encode()),
    **{f"no {name}": (name, lambda _: None) for name in ("id", "service", "outcome", "address")},
}
"""Column, and what becomes of its values."""


@pytest.mark.parametrize("what", FOREIGN)
def test_audit_names_a_file_with_rows_of_no_archive(tmp_path: Path, what: str) -> None:
    column, change = FOREIGN[what]
    lake = fill(Lake(str(tmp_path / "lake")), table([sent(1), handled(1)]), table([sent(2), handled(2)]))
    *_, file = sorted(Path(lake.table_url("history")).glob("day=*/*.parquet"))
    rows = pq.ParquetFile(file).read()
    changed = [*map(change, rows[column].to_pylist())]
    place = rows.schema.get_field_index(column)
    pq.write_table(rows.set_column(place, rows.schema.field(place), [pa.array(changed, rows[column].type)]), file)
    with pytest.raises(DurableError, match=f"{file.name} cannot be read: column {column} has .*; put it back from a"):
        audit_here([lake], [lake], Question())


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_audit_names_an_empty_last_commit(tmp_path: Path, content: bytes) -> None:
    lake = with_letters(tmp_path / "lake", [])
    *_, commit = sorted(Path(lake.table_url("history"), "_delta_log").glob("*.json"))
    commit.write_bytes(content)
    with pytest.raises(DurableError, match=f"{commit.name}: is (empty|damaged); put _delta_log back from a backup"):
        audit_here([lake], [lake], Question())
