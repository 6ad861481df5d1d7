"""Rows of an id are judged: what is planted among good ones is found, all of it and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.pipeline import ledger
from durable.pipeline.lake_tables import LakeTable
from durable.pipeline.matching import FOUND, LETTER, LOST, MAY_BE_LATE, RECEIVED, SENT, Edges, Judge
from durable.pipeline.spans import NO_SPAN, Span
from durable.pipeline.uses import DEDUPE_WINDOW
from tests.support.audits import numbered, with_own_id
from tests.support.lakes import SHOP, at, handled, letter, message_id, sent, table

EVERYTHING = Edges()
OF_SHOP = Edges(senders={SHOP: NO_SPAN})
TABLES: Mapping[str, LakeTable] = {
    **dict.fromkeys((SENT, RECEIVED, MAY_BE_LATE, LOST["history"]), "history"),
    **dict.fromkeys((LETTER, LOST["dead_letters"]), "dead_letters"),
}
"""Which table the rows of each role are of."""
Rows = Sequence[Mapping[str, Any]]
Findings = set[tuple[str, int]]
"""Kind of each, and number of its message."""


class Case(NamedTuple):
    """Rows, and what is found among them."""

    sends: Rows
    receipts: Rows
    findings: Findings
    letters: Rows = ()


def judged(
    shown: Mapping[str, Rows],
    edges: Edges = EVERYTHING,
    late_after: timedelta | None = None,
    dedupe_window: timedelta = DEDUPE_WINDOW,
) -> list[dict[str, Any]]:
    """The findings among these rows of each role."""
    rows = pa.concat_tables(ledger.in_role(role, table(of_role, TABLES[role])) for role, of_role in shown.items())
    found = Judge(edges, late_after, dedupe_window)(rows.sort_by("id").to_batches(max_chunksize=3))
    listed: list[dict[str, Any]] = pa.Table.from_batches(found, FOUND).to_pylist()
    return listed


def found(cases: Sequence[Case], edges: Edges = EVERYTHING, late_after: timedelta | None = None) -> list[Findings]:
    """What is found of each case."""
    numbers = [*enumerate(cases)]
    receipts = [with_own_id(number, row) for number, case in numbers for row in case.receipts]
    shown = {
        SENT: [with_own_id(number, row) for number, case in numbers for row in case.sends],
        RECEIVED: receipts,
        MAY_BE_LATE: receipts,
        LETTER: [with_own_id(number, row) for number, case in numbers for row in case.letters],
    }
    found: list[Findings] = [set() for _ in cases]
    for row in judged(shown, edges, late_after):
        number, message = numbered(row["id"])
        found[number].add((row["finding"], message))
    return found


TWO_PLACES = ("tcp://billing:1", "tcp://shipping:1")
LOCAL = handled(1, service=SHOP, address="local")
GIVEN_UP = {outcome: sent(1, outcome=outcome) for outcome in ("dead-lettered", "expired")}
REPLAYED = [sent(1, outcome="dead-lettered"), sent(1, finished_at=at(60))]
MONTH = 30 * 86_400
AGAIN = {"sent_at": at(MONTH), "finished_at": at(MONTH + 1)}
TWO_USES = [sent(1), sent(1, **AGAIN)]
EVENTS = [sent(n, address=address) for n in (1, 2, 3) for address in TWO_PLACES]
DUE = [handled(1, deliver_by=at(1.024)), handled(2, deliver_by=at(2.026)), handled(3)]
ONE_TO_THREE = [sent(1), sent(2), sent(3)]

AMONG_ROWS: Mapping[str, Case] = {
    "message sent and handled once is no finding": Case([sent(1), sent(2)], [handled(1), handled(2)], set()),
    "each kind of finding is found among its neighbours": Case(
        ONE_TO_THREE,
        [handled(1), handled(3), handled(3, finished_at=at(9)), handled(4)],
        {("lost", 2), ("twice", 3), ("alien", 4)},
    ),
    "message dead-lettered by its receiver is not lost": Case([sent(1)], [handled(1, outcome="dead-lettered")], set()),
    "message expired at its receiver is not lost": Case([sent(1)], [handled(1, outcome="expired")], set()),
    "message dead-lettered by its sender is not lost": Case([GIVEN_UP["dead-lettered"]], [], set()),
    "message expired at its sender is not lost": Case([GIVEN_UP["expired"]], [], set()),
    # Its acknowledgement was lost: the sender has given it up, and the receiver has it.
    "message dead-lettered by its sender is no alien": Case([GIVEN_UP["dead-lettered"]], [handled(1)], set()),
    "message expired at its sender is no alien": Case([GIVEN_UP["expired"]], [handled(1)], set()),
    "dead letter handled after a replay is not reported as twice": Case(
        [sent(1)], [handled(1, outcome="dead-lettered"), handled(1, finished_at=at(60))], set()
    ),
    "dead letter of the sender counts as sent once when replayed": Case(
        REPLAYED, [handled(1, finished_at=at(61))], set()
    ),
    "dead letter of the sender is lost after its replay": Case(REPLAYED, [], {("lost", 1)}),
    "message quarantined by its receiver is not lost without history": Case(
        [sent(1), sent(2)], [], {("lost", 2)}, letters=[letter(1)]
    ),
    "event is lost unless each receiver handled its copy": Case(
        EVENTS,
        [
            *(handled(1), handled(1, service="shipping")),
            *(handled(2), handled(2, finished_at=at(9))),  # twice here, and never there
            handled(3),
        ],
        {("lost", 2), ("twice", 2), ("lost", 3)},
    ),
    "event may be handled at two endpoints of one service": Case(
        [sent(1, address="tcp://billing:1"), sent(1, address="tcp://billing:2")],
        [handled(1, address="main"), handled(1, address="reports")],
        set(),
    ),
    "copies made by a broker are no aliens": Case([sent(1)], [handled(1), handled(1, service="shipping")], set()),
    "local message has only an incoming row": Case([], [LOCAL], set()),
    "local message may be handled twice": Case([], [LOCAL, LOCAL | {"finished_at": at(9)}], {("twice", 1)}),
    "local copy of an event hides no lost remote one": Case([sent(1)], [LOCAL], {("lost", 1)}),
    "dead letter of an event's local copy hides no lost remote one": Case(
        [sent(1), sent(2)],
        [LOCAL | {"outcome": "dead-lettered"}, handled(2, outcome="dead-lettered")],
        {("lost", 1)},
        letters=[letter(1, service=SHOP, address="local"), letter(2)],
    ),
    "message sent again under its id after the acknowledgement is one delivery": Case(
        [sent(1), sent(1, finished_at=at(60))], [handled(1)], set()
    ),
    "message handled after its deadline is late": Case(ONE_TO_THREE, DUE, {("late", 1)}),
    "key that was freed is handled once for each use": Case(TWO_USES, [handled(1), handled(1, **AGAIN)], set()),
    "first message of a freed key is lost": Case(TWO_USES, [handled(1, **AGAIN)], {("lost", 1)}),
    "second message of a freed key is lost": Case(TWO_USES, [handled(1)], {("lost", 1)}),
    "second message of a freed key is no alien beside the first": Case(
        [sent(1)], [handled(1), handled(1, **AGAIN)], {("alien", 1)}
    ),
    "local messages of a freed key are handled once each": Case([], [LOCAL, LOCAL | AGAIN], set()),
}


@pytest.mark.parametrize("name", AMONG_ROWS)
def test_rows_are_judged(name: str) -> None:
    assert found([AMONG_ROWS[name]]) == [AMONG_ROWS[name].findings]


def test_rows_of_many_ids_are_judged_apart() -> None:
    assert found([*AMONG_ROWS.values()]) == [case.findings for case in AMONG_ROWS.values()]


@pytest.mark.parametrize(("seconds", "findings"), [(10, {("late", 2)}), (11, set())])
def test_message_handled_after_the_given_bound_is_late(seconds: int, findings: Findings) -> None:
    receipts = [handled(1), handled(2, finished_at=at(12.5)), handled(3, finished_at=at(99), outcome="expired")]
    case = Case(ONE_TO_THREE, receipts, findings)
    assert found([case], late_after=timedelta(seconds=seconds)) == [findings]


def test_message_too_new_for_the_archives_is_open() -> None:
    edges = Edges(senders={SHOP: Span(until=at(60))}, receivers={"billing": Span(until=at(40))})
    findings = {("lost", 30), ("open", 50), ("alien", 31), ("open", 70)}
    case = Case([sent(30), sent(50)], [handled(31), handled(70)], findings)
    assert found([case], edges) == [findings]


WITHIN_TEN_SECONDS: Mapping[str, Case] = {
    "message sent before the lakes begin is not judged": Case(
        [sent(n) for n in (9, 10, 20)], [handled(n) for n in (8, 11, 21)], {("lost", 10), ("alien", 11)}
    ),
    "times rounded on the way match their counterparts": Case(
        [sent(10, sent_at=at(10.0004)), sent(20, sent_at=at(19.9996))],
        [handled(10, sent_at=at(9.9996)), handled(20, sent_at=at(20.0004))],
        set(),
    ),
}


@pytest.mark.parametrize("name", WITHIN_TEN_SECONDS)
def test_rows_at_the_edges_are_judged(name: str) -> None:
    assert found([WITHIN_TEN_SECONDS[name]], Edges(since=at(10), until=at(20))) == [WITHIN_TEN_SECONDS[name].findings]


# ---------------------------------------------------------------- business keys that are used again

DAY = 86_400
UUIDV7 = UUID("01890000-0000-7000-8000-000000000000")


class Use(NamedTuple):
    """A sending, the day on which it was, and how often it was handled."""

    day: int
    handled: int


@pytest.mark.parametrize(("key", "window"), [(message_id(1), 7), (message_id(1), 2), (UUIDV7, 7)])
@given(st.lists(st.builds(Use, st.integers(0, 20), st.integers(0, 2)), min_size=1, unique_by=lambda use: use.day))
def test_messages_of_one_id_are_judged_by_the_uses_of_its_key(key: UUID, window: int, sendings: list[Use]) -> None:
    """An id that carries its time is of one message."""
    uses: list[list[Use]] = []
    for use in sorted(sendings):
        if not uses or (key != UUIDV7 and use.day >= uses[-1][0].day + window):
            uses.append([])
        uses[-1].append(use)
    expected = []
    for of_use in uses:
        times, ends = [at(use.day * DAY) for use in of_use], [use for use in of_use if use.handled]
        expected += [] if ends else [("lost", times[0])]
        expected += [("twice", at(ends[0].day * DAY))] if sum(use.handled for use in of_use) > 1 else []
    rows = {
        SENT: [sent(1, id=key, sent_at=at(each.day * DAY), finished_at=at(each.day * DAY)) for each in sendings],
        RECEIVED: [
            handled(1, id=key, sent_at=at(each.day * DAY), finished_at=at(each.day * DAY + time))
            for each in sendings
            for time in range(each.handled)
        ],
    }
    found = judged(rows, dedupe_window=timedelta(days=window))
    assert sorted((row["finding"], row["sent_at"]) for row in found) == sorted(expected)


@pytest.mark.parametrize("rounding", [timedelta(milliseconds=-600), timedelta(0), timedelta(milliseconds=600)])
@pytest.mark.parametrize("offset", [timedelta(milliseconds=each) for each in (-300, 0, 300)])
def test_message_at_the_end_of_a_use_meets_its_counterpart(rounding: timedelta, offset: timedelta) -> None:
    """Transports may round the time of sending."""
    sends = [at(1), at(1) + timedelta(days=7) + offset]
    rows = {
        SENT: [sent(1, sent_at=each, finished_at=each) for each in sends],
        RECEIVED: [handled(1, sent_at=each + rounding, finished_at=each) for each in sends],
    }
    assert [row for row in judged(rows) if row["finding"] in ("lost", "alien")] == []


# ---------------------------------------------------------------- lives that databases have lost

WHERE = ("nowhere", "now", "lost", "both")


def expected(was_sent: str, was_handled: str, was_quarantined: str) -> str | None:
    """A message has been sent, and has come to an end, only where a life that is there says so."""
    is_sent, was_sent_once = was_sent in ("now", "both"), was_sent == "lost"
    is_ended = was_handled in ("now", "both") or was_quarantined in ("now", "both")
    if is_sent and not is_ended:
        return "undone" if "lost" in (was_handled, was_quarantined) else "lost"
    if not is_sent and was_handled in ("now", "both"):
        return "forgotten" if was_sent_once else "alien"
    return None


@pytest.mark.parametrize("is_local", [False, True])
def test_messages_are_judged_by_living_rows_alone(*, is_local: bool) -> None:
    sends: list[dict[str, Any]] = []
    receipts: list[dict[str, Any]] = []
    letters: list[dict[str, Any]] = []
    lost: dict[str, list[dict[str, Any]]] = {"history": [], "dead_letters": []}

    def add(to: list[dict[str, Any]], of: str, where: str, rows: Sequence[dict[str, Any]]) -> None:
        to += [row for row, life in zip(rows, ("now", "lost"), strict=True) if where in (life, "both")]
        lost[of] += [rows[1]] if where in ("lost", "both") else []

    wanted = set()
    ways = [*product(WHERE, WHERE, WHERE)]
    for number, (was_sent, was_handled, was_quarantined) in enumerate(ways):
        add(sends, "history", was_sent, [sent(number), sent(number, finished_at=at(900 + number))])
        again = {"finished_at": at(900 + number)}
        add(receipts, "history", was_handled, [handled(number), handled(number, **again)])
        add(letters, "dead_letters", was_quarantined, [letter(number), letter(number, failed_at=at(900 + number))])
        if is_local:  # beside it, in the sender: neither an end nor a finding, whatever its life
            local = {"service": SHOP, "address": "local"}
            add(receipts, "history", was_sent, [handled(number, **local), handled(number, **local, **again)])
        if kind := expected(was_sent, was_handled, was_quarantined):
            wanted.add((kind, number))
    shown = {
        SENT: sends,
        RECEIVED: receipts,
        LETTER: letters,
        LOST["history"]: lost["history"],
        LOST["dead_letters"]: lost["dead_letters"],
    }
    found = {(row["finding"], int(row["id"].replace("-", ""), 16)) for row in judged(shown, OF_SHOP)}
    assert found == wanted


# ---------------------------------------------------------------- replays under the same ids, to other addresses

REPLAYED_AT, NEW_ADDRESS = 500, "tcp://billing-new:1"
REPLAYS = Edges(replays={(SHOP, "shop-1", NEW_ADDRESS): [at(REPLAYED_AT)]})


class Sending(NamedTuple):
    """Address, second at which a message was sent first, and second at which the receiver had it."""

    address: str
    sent_at: int
    finished_at: int

    @property
    def is_replay(self) -> bool:
        return self.address == NEW_ADDRESS and self.sent_at < REPLAYED_AT <= self.finished_at


SENDINGS = st.builds(
    Sending,
    st.sampled_from([*TWO_PLACES, NEW_ADDRESS]),
    st.sampled_from([1, REPLAYED_AT, 600]),
    st.sampled_from([REPLAYED_AT - 1, REPLAYED_AT, 700]),
).filter(lambda each: each.sent_at <= each.finished_at)


@given(
    st.lists(SENDINGS, min_size=1, max_size=4, unique_by=lambda each: (each.address, each.finished_at)),
    st.sets(st.sampled_from(["billing", "shipping", "stock"])),
)
def test_replay_under_the_same_id_asks_for_no_other_copy(sendings: list[Sending], seen: set[str]) -> None:
    """All else that went to several addresses is copies, each of which must be seen."""
    sends = [
        sent(1, database="shop-1", address=each.address, sent_at=at(each.sent_at), finished_at=at(each.finished_at))
        for each in sendings
    ]
    copies = len({each.address for each in sendings if not each.is_replay}) or 1
    lost = {("lost", 1)} if len(seen) < copies else set()
    receipts = [handled(1, service=service) for service in sorted(seen)]
    assert found([Case(sends, receipts, lost)], REPLAYS) == [lost]


@pytest.mark.parametrize("other", [{"service": "mail"}, {"database": "shop-2"}, {"database": None}])
def test_replay_of_another_database_asks_for_every_copy(other: dict[str, Any]) -> None:
    moved = {"address": NEW_ADDRESS, "finished_at": at(700)}
    case = Case([sent(1, database="shop-1") | other, sent(1, database="shop-1") | other | moved], [handled(1)], set())
    assert found([case], REPLAYS) == [{("lost", 1)}]


def test_event_lost_at_one_place_and_undone_at_another_is_lost() -> None:
    undone = [handled(1), handled(2), handled(2, service="shipping")]
    shown = {
        SENT: [sent(n, address=address) for n in (1, 2) for address in TWO_PLACES],
        RECEIVED: undone,
        LOST["history"]: undone,
    }
    assert {(row["finding"], int(row["id"][-1]), row["detail"]) for row in judged(shown)} == {
        ("lost", 1, "seen nowhere; an end at billing main is of a life that its database has lost"),
        ("undone", 2, "seen nowhere; an end at billing main shipping main is of a life that its database has lost"),
    }
