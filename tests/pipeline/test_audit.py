"""The audit: what is planted among good history is found, all of it and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline import ledger
from durable.pipeline.audit import Question, Verdict, audit, audit_here
from durable.pipeline.choosing import Choice, choose
from durable.pipeline.lake import Lake
from durable.pipeline.lake_marks import Whole
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.matching import FINDINGS, Edges, History, findings, inside, of, unbalanced
from durable.pipeline.rows import records
from durable.pipeline.spans import Gap, Span
from tests.support.lakes import SHOP, at, fill, frame, handled, letter, many, message_id, sent, table

NOTHING = dict.fromkeys(FINDINGS, 0)
EVERYTHING = Edges()
Rows = Sequence[Mapping[str, Any]]


def found(
    spark: SparkSession, sends: Rows, receipts: Rows, letters: Rows = (), edges: Edges = EVERYTHING, **late: timedelta
) -> set[tuple[str, int]]:
    """The findings among these rows: kind, and number of the message."""
    sent_rows, received_rows = (inside(frame(spark, rows), edges) for rows in (sends, receipts))
    history = History(sent_rows, received_rows, frame(spark, letters, "dead_letters"), {SHOP})
    rows = records(findings(of(history, unbalanced(history)), history.received, edges, **late))
    return {(row["finding"], int(row["id"].replace("-", ""), 16)) for row in rows}


def test_message_sent_and_handled_once_is_no_finding(spark: SparkSession) -> None:
    assert found(spark, [sent(1), sent(2)], [handled(1), handled(2)]) == set()


def test_each_kind_of_finding_is_found_among_its_neighbours(spark: SparkSession) -> None:
    sends = [sent(1), sent(2), sent(3)]
    receipts = [handled(1), handled(3), handled(3, finished_at=at(9)), handled(4)]
    assert found(spark, sends, receipts) == {("lost", 2), ("twice", 3), ("alien", 4)}


@pytest.mark.parametrize("outcome", ["dead-lettered", "expired"])
def test_message_dead_lettered_or_expired_by_its_receiver_is_not_lost(spark: SparkSession, outcome: str) -> None:
    assert found(spark, [sent(1)], [handled(1, outcome=outcome)]) == set()


@pytest.mark.parametrize("outcome", ["dead-lettered", "expired"])
def test_message_dead_lettered_or_expired_by_its_sender_is_neither_lost_nor_alien(
    spark: SparkSession, outcome: str
) -> None:
    ended = sent(1, outcome=outcome)
    assert found(spark, [ended], []) == set()
    # Its acknowledgement was lost: the sender has given it up, and the receiver has it.
    assert found(spark, [ended], [handled(1)]) == set()


def test_dead_letter_handled_after_a_replay_is_not_reported_as_twice(spark: SparkSession) -> None:
    receipts = [handled(1, outcome="dead-lettered"), handled(1, finished_at=at(60))]
    assert found(spark, [sent(1)], receipts) == set()


def test_dead_letter_of_the_sender_counts_as_sent_once_when_replayed(spark: SparkSession) -> None:
    sends = [sent(1, outcome="dead-lettered"), sent(1, finished_at=at(60))]
    assert found(spark, sends, [handled(1, finished_at=at(61))]) == set()
    assert found(spark, sends, []) == {("lost", 1)}


def test_message_quarantined_by_its_receiver_is_not_lost_without_history(spark: SparkSession) -> None:
    assert found(spark, [sent(1), sent(2)], [], [letter(1)]) == {("lost", 2)}
    assert found(spark, [sent(1)], [], [letter(7, id=None)]) == {("lost", 1)}


def test_event_is_lost_unless_each_receiver_handled_its_copy(spark: SparkSession) -> None:
    sends = [sent(n, address=address) for n in (1, 2, 3) for address in ("tcp://billing:1", "tcp://shipping:1")]
    both = [handled(1), handled(1, service="shipping")]
    one = [handled(2), handled(2, finished_at=at(9))]  # twice here, and never there
    assert found(spark, sends, [*both, *one, handled(3)]) == {("lost", 2), ("twice", 2), ("lost", 3)}


def test_an_event_may_be_handled_at_two_endpoints_of_one_service(spark: SparkSession) -> None:
    sends = [sent(1, address="tcp://billing:1"), sent(1, address="tcp://billing:2")]
    assert found(spark, sends, [handled(1, address="main"), handled(1, address="reports")]) == set()


def test_copies_made_by_a_broker_are_no_aliens(spark: SparkSession) -> None:
    assert found(spark, [sent(1)], [handled(1), handled(1, service="shipping")]) == set()


def test_local_messages_have_only_an_incoming_row(spark: SparkSession) -> None:
    local = handled(1, service=SHOP, address="local")
    assert found(spark, [], [local]) == set()
    assert found(spark, [], [local, local]) == {("twice", 1)}


def test_a_local_copy_of_an_event_hides_no_lost_remote_one(spark: SparkSession) -> None:
    assert found(spark, [sent(1)], [handled(1, service=SHOP, address="local")]) == {("lost", 1)}


def test_message_sent_again_under_its_id_after_the_acknowledgement_is_one_delivery(spark: SparkSession) -> None:
    assert found(spark, [sent(1), sent(1, finished_at=at(60))], [handled(1)]) == set()


def test_message_handled_after_the_given_bound_is_late(spark: SparkSession) -> None:
    receipts = [handled(1), handled(2, finished_at=at(12.5)), handled(3, finished_at=at(99), outcome="expired")]
    sends = [sent(1), sent(2), sent(3)]
    assert found(spark, sends, receipts, late_after=timedelta(seconds=10)) == {("late", 2)}
    assert found(spark, sends, receipts, late_after=timedelta(seconds=11)) == set()


def test_message_handled_after_its_deadline_is_late(spark: SparkSession) -> None:
    receipts = [handled(1, deliver_by=at(1.024)), handled(2, deliver_by=at(2.026)), handled(3)]
    assert found(spark, [sent(1), sent(2), sent(3)], receipts) == {("late", 1)}


def test_message_too_new_for_the_archives_is_open(spark: SparkSession) -> None:
    edges = Edges(senders={SHOP: Span(until=at(60))}, receivers={"billing": Span(until=at(40))})
    sends, receipts = [sent(30), sent(50)], [handled(31), handled(70)]
    assert found(spark, sends, receipts, edges=edges) == {("lost", 30), ("open", 50), ("alien", 31), ("open", 70)}


def test_message_sent_before_the_lakes_begin_is_not_judged(spark: SparkSession) -> None:
    edges = Edges(since=at(10), until=at(20))
    assert found(spark, [sent(n) for n in (9, 10, 20)], [handled(n) for n in (8, 11, 21)], edges=edges) == {
        ("lost", 10),
        ("alien", 11),
    }


def test_times_rounded_on_the_way_match_their_counterparts(spark: SparkSession) -> None:
    edges = Edges(since=at(10), until=at(20))
    sends = [sent(10, sent_at=at(10.0004)), sent(20, sent_at=at(19.9996))]
    receipts = [handled(10, sent_at=at(9.9996)), handled(20, sent_at=at(20.0004))]
    assert found(spark, sends, receipts, edges=edges) == set()


# ---------------------------------------------------------------- over lakes

LOST, TWICE, ALIEN, LATE = (1_111, 50_000, 999_000), (1_112, 222_222), (1_113, 500_000, 700_000, 888_888), (7, 8, 9)


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Lake]:
    """A million messages sent by the shop and handled by billing, and what was planted among them."""
    folder = tmp_path_factory.mktemp("million")
    every = np.arange(1_000, 1_001_000)
    again = [handled(0, id=message_id(n), sent_at=at(n / 1_000), finished_at=at(n / 1_000 + 60)) for n in TWICE]
    sent_slowly = [sent(n, sent_at=at(500), finished_at=at(501)) for n in LATE]
    handled_late = [handled(n, sent_at=at(500), finished_at=at(2_000)) for n in LATE]
    sends, receipts = np.setdiff1d(every, ALIEN), np.setdiff1d(every, LOST)
    return (
        fill(Lake(str(folder / "sender")), many(sends, "outgoing"), table(sent_slowly)),
        fill(Lake(str(folder / "receiver")), many(receipts, "incoming"), table([*again, *handled_late])),
    )


def test_audit_of_a_million_messages_finds_exactly_the_planted_losses(
    spark: SparkSession, million: tuple[Lake, Lake], tmp_path: Path
) -> None:
    sender, receiver = million
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
        *(sent(13), handled(13), *[handled(13, outcome="expired")] * (1 << 14)),  # so many that a sum comes round
    ]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows[::2]), table(rows[1::2]))
    history = frame(spark, rows)
    sides = [history.where(f"side = '{side}'") for side in ("outgoing", "incoming")]
    shuffled = unbalanced(History(sides[0], sides[1], history, {SHOP}))
    sliced = ledger.suspects(
        spark, [*ledger.sources([lake], "outgoing"), *ledger.sources([lake], "incoming")], EVERYTHING
    )
    assert sliced is not None
    for found in (shuffled, sliced):
        assert sorted(int.from_bytes(row["id"]) for row in records(found)) == [2, 3, 5, 6, 8, 9, 11, 12, 13]


def test_audit_joining_the_rows_of_too_many_suspects_counts_the_same(
    spark: SparkSession, million: tuple[Lake, Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = million
    monkeypatch.setattr("durable.pipeline.audit._FEW", 3)
    monkeypatch.setattr("durable.pipeline.ledger.MOST_SLICES", 0)
    verdict = audit(spark, [sender], [receiver], Question(late_after=timedelta(minutes=15)))
    assert verdict.counts == NOTHING | {"lost": 3, "twice": 2, "alien": 4, "late": 3}


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


def audited(spark: SparkSession, senders: Sequence[Lake], receivers: Sequence[Lake], question: Question) -> Verdict:
    """By Spark; without it either the same is found, or that Spark must look closer."""
    verdict = audit(spark, senders, receivers, question)
    assert audit_here(senders, receivers, question) in (None, verdict)
    return verdict


GOOD: Rows = [sent(1, deliver_by=at(9)), handled(1, deliver_by=at(9)), sent(2), handled(2), handled(3, address="local")]


def test_few_rows_without_a_finding_need_no_spark(spark: SparkSession, tmp_path: Path) -> None:
    lake = fill(Lake(str(tmp_path / "lake")), table(GOOD[::2]), table(GOOD[1::2]))
    for question in (
        Question(),
        Question(since=at(1.5), until=at(2.5)),
        Question(late_after=timedelta(milliseconds=25)),
        Question(archived_until=at(99)),
    ):
        seen = audit_here([lake], [lake], question)
        assert seen is not None
        assert (seen, seen.counts) == (audit(spark, [lake], [lake], question), NOTHING)
    assert audit_here([lake], [lake], Question(late_after=timedelta(milliseconds=24))) is None
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
def test_flaw_among_few_rows_is_left_to_spark(tmp_path: Path, flaw: str) -> None:
    lake = fill(Lake(str(tmp_path / "lake")), table([*GOOD, *FLAWS[flaw]]))
    assert audit_here([lake], [lake], Question()) is None
    elsewhere = Question(until=at(5))
    assert audit_here([lake], [lake], elsewhere) is not None


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_are_judged_alike_with_and_without_spark(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Rows of good messages, some of which are left out, doubled or slow, by the seed."""
    random, rows = np.random.default_rng(seed), list[Mapping[str, Any]]()
    for number in range(1, 30):
        good = [sent(number), handled(number, finished_at=at(number + random.choice([0.02, 30])))]
        rows += good if random.random() < 0.99 else [good[random.integers(2)]] * int(random.integers(0, 3))
    lake = fill(Lake(str(tmp_path / "lake")), table(rows[::2]), table(rows[1::2]))
    question = Question(settle=timedelta(0), late_after=timedelta(seconds=60 if seed % 2 else 10))
    verdict = audited(spark, [lake], [lake], question)
    if verdict.failed or verdict.counts["late"]:
        assert audit_here([lake], [lake], question) is None


# ---------------------------------------------------------------- histories that end at different times


Place = tuple[str, str]
"""Which lake, and which service."""


class Archives:
    """Services that were archived at different times into lakes of their own or one that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lakes: dict[str, Lake] = {}

    def add(
        self,
        lake: str,
        service: str,
        rows: Rows,
        begin: float,
        until: float,
        database: str = "a",
        gaps: Sequence[tuple[float, float]] = (),
        of: Sequence[LakeTable] = ("history", "dead_letters"),
    ) -> None:
        """These rows, and that the service's history is whole from `begin` to `until`, but for the gaps of one table or
        both.
        """
        where = self.lakes.setdefault(lake, Lake(str(self.folder / lake)))
        fill(where, table([{**row, "service": service, "database": f"{service}-{database}"} for row in rows]))
        app, whose = f"{service}-{database}", Whose(service, f"{service}-{database}")
        for name in SOURCES:
            where.create(name)
            missing = tuple(Gap(at(first), at(end)) for first, end in gaps) if name in of else ()
            low, span = where.offset(app, name), Span(at(begin), at(until), missing)
            where.commit(name, [], app_id=app, low=low, high=low + 1, whole=Whole(whose, span))

    def audit(self, spark: SparkSession, settle: float = 1, since: datetime | None = None) -> set[tuple[str, str]]:
        lakes = list(self.lakes.values())
        question = Question(settle=timedelta(seconds=settle), since=since, example_count=1_000)
        verdict = audited(spark, lakes, lakes, question)
        assert verdict.failed == any(verdict.counts[kind] for kind in ("lost", "twice"))
        return {(row["finding"], row["id"]) for row in verdict.examples if row["finding"] != "open"}


TO = {"billing": "tcp://billing:2302", "shipping": "tcp://shipping:2302"}
LAKES = [("one", "one", "one"), ("a", "b", "c"), ("a", "a", "b")]


@pytest.mark.parametrize("lakes", LAKES)
@pytest.mark.parametrize(
    ("billing", "shipping"),
    [
        pytest.param((0, 1_000), (0, 1_000), id="all whole"),
        pytest.param((0, 500), (0, 1_000), id="one held back"),
        pytest.param((500, 1_000), (0, 1_000), id="one begins late"),
        pytest.param((300, 600), (400, 1_000), id="both"),
    ],
)
def test_audit_judges_each_service_within_its_own_history(
    spark: SparkSession, tmp_path: Path, lakes: tuple[str, ...], billing: tuple[int, int], shipping: tuple[int, int]
) -> None:
    spans = {"billing": billing, "shipping": shipping}
    archives, planted = Archives(tmp_path), set()
    sends: list[Mapping[str, Any]] = []
    receipts: dict[str, list[Mapping[str, Any]]] = {"billing": [], "shipping": []}
    for number in range(1, 1_000, 7):
        for offset, (service, (begin, until)) in enumerate(spans.items()):
            n = number + offset
            sends.append(sent(n, address=TO[service]))
            is_lost = number % 5 == 0
            if is_lost and begin <= n < until - 1.01:
                planted.add(("lost", str(message_id(n))))
            if not is_lost and begin <= n and n + 0.025 < until:
                receipts[service].append(handled(n, service=service))
    archives.add(lakes[0], SHOP, sends, 0, 1_000)
    archives.add(lakes[1], "billing", receipts["billing"], *billing)
    archives.add(lakes[2], "shipping", receipts["shipping"], *shipping)
    assert len(planted) > 10
    assert archives.audit(spark) == planted


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
_HOLED = [
    (side, shape, LAKES[number % 3], (1_000.0, 600.0)[number % 2])
    for number, (side, shape) in enumerate(product(("sender", "receiver", "both"), GAPS))
]


def lies_in(gaps: Sequence[tuple[float, float]], moment: float) -> bool:
    return any(first <= moment < end for first, end in gaps)


def may_lie_in(gaps: Sequence[tuple[float, float]], sent_at: float, seen_at: float) -> bool:
    """Of a row whose time is unknown: it is of after `sent_at`, and not much later than the other side saw it."""
    return any(seen_at >= first - LATER and sent_at < end for first, end in gaps)


@pytest.mark.parametrize(("side", "shape", "lakes", "until"), _HOLED)
def test_audit_separates_rows_in_a_gap_from_lost_rows(
    spark: SparkSession, tmp_path: Path, side: str, shape: str, lakes: tuple[str, ...], until: float
) -> None:
    """Every fifth message was lost; of the others each side has its row, unless that lies in a gap or is yet to come.

    Billing's history ends at `until`, and shipping's has no gap.
    """
    of_shop, of_billing = (GAPS[shape] if side in (each, "both") else () for each in ("sender", "receiver"))
    receivers = {"billing": (of_billing, until), "shipping": ((), 1_000.0)}
    expected: set[tuple[str, str]] = set()
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
            expected.add(("unarchived" if may_lie_in(gaps, n, acknowledged) else "lost", str(message_id(n))))
        if has_received and not has_sent and ended < 1_000 - LATER:
            expected.add(("unarchived", str(message_id(n))))
    archives = Archives(tmp_path)
    archives.add(lakes[0], SHOP, sends, 0, 1_000, gaps=of_shop)
    archives.add(lakes[1], "billing", receipts["billing"], 0, until, gaps=of_billing)
    archives.add(lakes[2], "shipping", receipts["shipping"], 0, 1_000)
    assert len([kind for kind, _ in expected if kind == "lost"]) > 5
    assert bool(GAPS[shape]) == any(kind == "unarchived" for kind, _ in expected)
    assert archives.audit(spark, settle=LATER) == expected


@pytest.mark.parametrize("of", [("history",), ("dead_letters",)])
def test_audit_knows_the_gaps_of_either_table(spark: SparkSession, tmp_path: Path, of: Sequence[LakeTable]) -> None:
    archives = Archives(tmp_path)
    archives.add("lake", SHOP, [sent(150), sent(350), sent(450)], 0, 1_000)
    archives.add("lake", "billing", [handled(1)], 0, 1_000, gaps=[(300, 400)], of=of)
    assert archives.audit(spark, since=at(100)) == {
        ("lost", str(message_id(150))),
        ("unarchived", str(message_id(350))),
        ("lost", str(message_id(450))),
    }


@pytest.mark.parametrize(
    ("seen_at", "finding"),
    [
        pytest.param([], "unarchived", id="seen nowhere"),
        pytest.param(["billing"], "lost", id="not seen by the service without a gap"),
        pytest.param(["shipping"], "unarchived", id="not seen by the service with the gap"),
    ],
)
def test_missing_copy_of_an_event_is_unknown_only_for_the_service_with_the_gap(
    spark: SparkSession, tmp_path: Path, seen_at: Sequence[str], finding: str
) -> None:
    archives = Archives(tmp_path)
    known = [sent(n, address=TO[service]) for n, service in ((1, "billing"), (2, "shipping"))]
    event = [sent(350, address=address) for address in TO.values()]
    receipts = {service: [handled(n, service=service)] for n, service in ((1, "billing"), (2, "shipping"))}
    for service in seen_at:
        receipts[service].append(handled(350, service=service))
    archives.add("lake", SHOP, [*known, *event], 0, 1_000)
    archives.add("lake", "billing", receipts["billing"], 0, 1_000, gaps=[(300, 400)])
    archives.add("lake", "shipping", receipts["shipping"], 0, 1_000)
    assert archives.audit(spark) == {(finding, str(message_id(350)))}


@pytest.mark.parametrize(
    ("second", "finding"),
    [
        pytest.param((300, 1_000), "lost", id="that begins before the first ends"),
        pytest.param((400, 1_000), "unarchived", id="that begins after the first has ended"),
    ],
)
def test_time_between_two_lakes_of_one_database_is_a_gap(
    spark: SparkSession, tmp_path: Path, second: tuple[float, float], finding: str
) -> None:
    archives = Archives(tmp_path)
    archives.add("lake", SHOP, [sent(350), sent(100), sent(800)], 0, 1_000)
    archives.add("old", "billing", [handled(100)], 0, 300)
    archives.add("new", "billing", [handled(800)], *second)
    assert archives.audit(spark) == {(finding, str(message_id(350)))}


def test_lake_without_a_gap_fills_the_gap_of_another(spark: SparkSession, tmp_path: Path) -> None:
    archives = Archives(tmp_path)
    archives.add("lake", SHOP, [sent(350), sent(100), sent(800), sent(500)], 0, 1_000)
    archives.add("old", "billing", [handled(100, xid=1)], 0, 1_000, gaps=[(300, 400), (700, 900)])
    archives.add("new", "billing", [handled(500, xid=2)], 200, 600)
    assert archives.audit(spark) == {("lost", str(message_id(350))), ("unarchived", str(message_id(800)))}


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


def test_rows_of_an_old_and_a_new_lake_are_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    sends = [sent(n, xid=n) for n in range(1, 51)]
    receipts = [handled(n, xid=n) for n in range(1, 51) if n != 17]
    archives = Archives(tmp_path)
    for lake, last in (("old", 30), ("new", 1_000)):
        archives.add(lake, SHOP, sends[:last], 0, last)
        archives.add(lake, "billing", receipts[:last], 0, last)
    assert archives.audit(spark) == {("lost", str(message_id(17)))}


def test_letters_of_two_databases_of_one_service_are_told_apart(spark: SparkSession, tmp_path: Path) -> None:
    ours = [letter(n, database="billing-a") for n in range(1, 11)]
    resolved = {"resolved_at": at(99), "resolution": "discarded", "xid": 2}
    theirs = [letter(n, database="billing-b") | state for n in range(1, 11) for state in ({}, resolved)]
    lake = fill(Lake(str(tmp_path / "lake")), table([*ours, *theirs], "dead_letters"), of="dead_letters")
    chosen = choose(spark, lake, Choice(table="dead_letters"))
    assert {(row["database"], row["letter_id"]) for row in records(chosen)} == {("billing-a", n) for n in range(1, 11)}
