"""Services whose archives stand still, or have no row of the period: an audit judges each by its own history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from durable.errors import InvalidSetting
from durable.pipeline.audit import Question, Verdict, audit_here
from durable.pipeline.lake import Lake
from durable.pipeline.lake_marks import Whole
from durable.pipeline.lake_tables import SOURCES, Whose
from durable.pipeline.spans import Span
from tests.support.lakes import BILLING, SHOP, TO_BILLING, at, fill, handled, sent, table

HOUR, DAY = 3_600, 86_400
NOW = 8 * DAY
Rows = Sequence[Mapping[str, Any]]


class Service(NamedTuple):
    """Rows of one database of a service, all of which its lake has from `begin` up to `until`."""

    lake: str
    name: str
    rows: Rows
    until: float
    database: str = "first"
    begin: float = 0


def lakes(folder: Path, services: Sequence[Service]) -> list[Lake]:
    found = {each.lake: Lake(str(folder / each.lake)) for each in services}
    for lake in found.values():
        for name in SOURCES:
            lake.create(name)
    for place, service, rows, until, database, begin in services:
        own = [{**row, "service": service, "database": f"{service}-{database}"} for row in rows]
        if own:
            fill(found[place], table(own))
        whose = Whose(service, f"{service}-{database}")
        for name in SOURCES:
            whole = Whole(whose, Span(at(begin), at(until)))
            found[place].commit(name, [], app_id=f"{whose}", low=0, high=1, whole=whole)
    return [*found.values()]


def judged(of: Sequence[Lake], **question: Any) -> Verdict:
    return audit_here(of, of, Question(**{"settle": timedelta(0), **question}))


def counts(verdict: Verdict) -> dict[str, int]:
    return {kind: count for kind, count in verdict.counts.items() if count}


EARLIER = {
    "never": ([], []),
    "before the period": ([sent(DAY)], [handled(DAY)]),
    "in it": ([sent(7 * DAY)], [handled(7 * DAY)]),
}
"""When the shop sent a message that billing handled, and both archives have it."""


@pytest.mark.parametrize(("side", "earlier", "is_shared"), [*product(("receiver", "sender"), EARLIER, (True, False))])
def test_message_after_the_end_of_a_history_is_open(tmp_path: Path, side: str, earlier: str, is_shared: bool) -> None:
    """Whether that history has a row of the period or not."""
    of_shop, of_billing = EARLIER[earlier]
    late = NOW - HOUR
    until = 7 * DAY + HOUR if earlier == "in it" else 2 * DAY
    news = ([sent(late)], []) if side == "receiver" else ([], [handled(late)])
    ends = (NOW, until) if side == "receiver" else (until, NOW)
    services = [
        Service("one", SHOP, [*of_shop, *news[0]], ends[0]),
        Service("one" if is_shared else "two", BILLING, [*of_billing, *news[1]], ends[1]),
    ]
    found = lakes(tmp_path, services)
    for since in (None, at(6 * DAY)):
        verdict = judged(found, since=since)
        assert (counts(verdict), verdict.failed) == ({"open": 1}, False)
        assert not any("none of the senders" in row["detail"] for row in verdict.examples)
    fill(found[-1], table([{**handled(late), "database": "billing-first"}, {**sent(late), "database": "shop-first"}]))
    assert counts(judged(found, since=at(6 * DAY))) == {}


def retired(folder: Path) -> list[Lake]:
    """Billing's first database was archived for the last time five days ago, and the second took its place."""
    of_shop = [sent(DAY), sent(6 * DAY), sent(6 * DAY + 1), sent(NOW - HOUR)]
    return lakes(
        folder,
        [
            Service("one", SHOP, of_shop, NOW),
            Service("one", BILLING, [handled(DAY)], 3 * DAY),
            Service("one", BILLING, [handled(6 * DAY)], NOW, "second"),
        ],
    )


JUDGED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, int]]] = {
    "alone": ({}, {"overdue": 1, "open": 1}),
    "of its own period": ({"since": at(5 * DAY)}, {"overdue": 1, "open": 1}),
    "patiently": ({"overdue_after": timedelta(days=6)}, {"open": 2}),
    "with its name": ({"lost_databases": ["billing-first"]}, {"lost": 2}),
    "with its name, of the period": ({"lost_databases": ["billing-first"], "since": at(5 * DAY)}, {"lost": 2}),
}


@pytest.mark.parametrize("how", JUDGED)
def test_retired_database_hides_no_loss(tmp_path: Path, how: str) -> None:
    question, found = JUDGED[how]
    verdict = judged(retired(tmp_path), **question)
    assert counts(verdict) == found
    assert verdict.failed == (how != "patiently")
    (billing,) = (row for row in verdict.spans if (row["service"], row["side"]) == (BILLING, "incoming"))
    behind = None if "name" in how or how == "patiently" else 5 * DAY
    assert (billing["held_by"], billing["behind_seconds"]) == (
        "billing-second" if "name" in how else "billing-first",
        behind,
    )


def test_lost_database_unknown_to_every_lake_is_refused(tmp_path: Path) -> None:
    found = retired(tmp_path)
    with pytest.raises(InvalidSetting, match="--lost-database: no lake has rows of billing-frist; name one that"):
        audit_here(found, found, Question(lost_databases=["billing-frist"]))


LOST_AT = {TO_BILLING: 4, "tcp://nowhere:1": 3}
"""How many messages were lost at each address; at the second one nothing ever arrived."""
JOINED: Mapping[str, Sequence[Service]] = {
    "nothing": (),
    "an empty database": [Service("one", BILLING, [], NOW, "second", 7 * DAY)],
    "an empty database in a lake of its own": [Service("two", BILLING, [], NOW, "second", 7 * DAY)],
    "an unrelated service": [Service("one", "catalog", [], NOW, begin=7 * DAY)],
    "the same service by another name": [Service("one", "invoicing", [handled(7 * DAY + HOUR)], NOW, begin=7 * DAY)],
}


def with_losses(joined: Sequence[Service]) -> Sequence[Service]:
    addresses = [address for address, count in LOST_AT.items() for _ in range(count)]
    losses = [sent(4 * DAY + number, address=address) for number, address in enumerate(addresses)]
    known = [*joined, Service("one", BILLING, [handled(DAY)], NOW)]
    arrived = [sent(row["id"].int) for service in known for row in service.rows]
    return [Service("one", SHOP, [*arrived, *losses], NOW), *known]


@pytest.mark.parametrize(("who", "is_first_lost"), [*product(JOINED, (False, True))])
def test_service_joining_later_hides_no_loss(tmp_path: Path, who: str, is_first_lost: bool) -> None:
    found = lakes(tmp_path, with_losses(JOINED[who]))
    verdict = judged(found, lost_databases=["billing-first"] if is_first_lost else [])
    assert (counts(verdict), verdict.failed) == ({"lost": 7}, True)


def test_database_beginning_later_is_named(tmp_path: Path) -> None:
    """What is complete from when is told of the first one, and of each that joined."""
    verdict = judged(lakes(tmp_path, with_losses(JOINED["an empty database"])))
    (billing,) = (row for row in verdict.spans if (row["service"], row["side"]) == (BILLING, "incoming"))
    assert billing["begin"] == at(0)
    assert billing["later"] == [{"database": "billing-second", "begin": at(7 * DAY)}]


def test_second_database_of_a_sender_hides_no_alien(tmp_path: Path) -> None:
    services = [
        Service("one", SHOP, [], NOW),
        Service("one", SHOP, [], NOW, "second", 7 * DAY),
        Service("one", BILLING, [handled(4 * DAY)], NOW),
    ]
    assert counts(judged(lakes(tmp_path, services))) == {"alien": 1}


def test_message_from_before_the_history_of_its_receiver_is_unarchived(tmp_path: Path) -> None:
    of_shop = [sent(DAY), sent(2 * DAY), sent(3 * DAY)]
    services = [
        Service("one", SHOP, of_shop, NOW),
        Service("one", BILLING, [handled(3 * DAY)], NOW, begin=2 * DAY),
    ]
    verdict = judged(lakes(tmp_path, services))
    assert (counts(verdict), verdict.failed) == ({"lost": 1, "unarchived": 1}, True)
    details = {row["finding"]: row["detail"] for row in verdict.examples}
    assert details == {
        "lost": "seen nowhere",
        "unarchived": f"seen nowhere; the history of billing-first begins at {at(2 * DAY):%Y-%m-%d %H:%M:%S}",
    }


TO_MAIL = "tcp://mail:1"
SEEN: Mapping[str, tuple[Sequence[str], Mapping[str, int]]] = {
    "nowhere": ((), {"unarchived": 1}),
    "where the history is whole": ((BILLING,), {"unarchived": 1}),
    "where it begins later": (("mail",), {"lost": 1}),
}


@pytest.mark.parametrize("where", SEEN)
def test_missing_copy_is_unknown_only_where_a_history_begins_later(tmp_path: Path, where: str) -> None:
    """An event of the first day went to billing, and to mail, whose history begins on the second but for a few rows."""
    services, found = SEEN[where]
    event = [sent(DAY, address=address) for address in (TO_BILLING, TO_MAIL)]
    alone = [sent(3 * DAY), sent(3 * DAY + 1, address=TO_MAIL)]
    rows = {BILLING: [handled(3 * DAY)], "mail": [handled(3 * DAY + 1)]}
    for service in services:
        rows[service].append(handled(DAY))
    archived = [Service("one", name, rows[name], NOW, begin=2 * DAY if name == "mail" else 0) for name in rows]
    verdict = judged(lakes(tmp_path, [Service("one", SHOP, [*event, *alone], NOW), *archived]))
    assert counts(verdict) == found


FIRST = 6 * DAY
"""When what joins begins to archive."""
PLACES: Final = 24


def to(place: int) -> str:
    return f"tcp://place-{place}:1"


def random_services() -> list[Service]:
    """A shop, and services with an address each. All had a message of late, and some have purged what they did before
    their history begins; half of the rest is lost, also of what went to places at which nothing arrived.
    """
    random = np.random.default_rng(2030)
    of_shop, receivers = list[Mapping[str, Any]](), list[Service]()
    for place in range(PLACES):
        begin, moments = int(random.integers(0, 4)) * DAY, random.integers(0, 5 * DAY, 8).tolist()
        numbers = [5 * DAY + place, *(moment // PLACES * PLACES + place for moment in {*moments})]
        of_shop += [sent(number, address=to(place)) for number in numbers]
        seen = [number for number in numbers if number >= begin and (number >= 5 * DAY or random.random() < 0.5)]
        if place % 4:
            receivers.append(Service("one", f"place-{place}", [handled(number) for number in seen], FIRST, begin=begin))
    return [Service("one", SHOP, of_shop, FIRST), *receivers]


def empty_databases(services: Sequence[Service]) -> list[Service]:
    return [Service("one", each.name, [], NOW, "second", FIRST) for each in services]


def unrelated_services(services: Sequence[Service]) -> list[Service]:
    return [Service("two", f"unrelated-{number}", [], NOW, begin=FIRST) for number, _ in enumerate(services)]


def renamed_services(services: Sequence[Service]) -> list[Service]:
    """Each of them has received a message at the address of the one before it."""
    numbers = {FIRST + number: each.name for number, each in enumerate(services) if each.name != SHOP}
    sends = [sent(number, address=f"tcp://{name}:1") for number, name in numbers.items()]
    receivers = [
        Service("one", f"{name}-renamed", [handled(number)], NOW, begin=FIRST) for number, name in numbers.items()
    ]
    return [Service("one", SHOP, sends, NOW, "second", FIRST), *receivers]


def failing(verdict: Verdict) -> set[str]:
    assert len(verdict.examples) == sum(verdict.counts.values())
    return {row["id"] for row in verdict.examples if row["finding"] in ("lost", "undone", "twice", "overdue")}


@pytest.fixture(scope="module")
def failed_before(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Messages of the random history that failed before anything joined it."""
    found = lakes(tmp_path_factory.mktemp("before"), random_services())
    return failing(judged(found, example_count=10_000))


@pytest.mark.parametrize("joined", [empty_databases, unrelated_services, renamed_services])
def test_failure_stays_one_when_others_join(
    tmp_path: Path, failed_before: set[str], joined: Callable[[Sequence[Service]], list[Service]]
) -> None:
    """Each message that does not balance is found, whether anybody knows what became of it or not."""
    services = random_services()
    verdict = judged(lakes(tmp_path, [*services, *joined(services)]), example_count=10_000)
    assert len(failed_before) > 50
    assert failed_before <= failing(verdict)
    seen = {row["id"] for each in services for row in each.rows if row["side"] == "incoming"}
    of_shop = {row["id"] for row in services[0].rows}
    assert {str(each) for each in of_shop - seen} == {row["id"] for row in verdict.examples}


def test_databases_of_a_lake_are_known_from_checkpoints_and_commits(tmp_path: Path) -> None:
    """Also those without a row, and with colons in their names."""
    (lake,) = lakes(tmp_path, [Service("one", SHOP, [], 1), Service("one", BILLING, [], 1, "a:b")])
    lake.opened("history").create_checkpoint()
    for number in range(12):
        lake.commit("history", [], app_id="later", low=number, high=number + 1)
    whole = Whole(Whose("mail", "mail-1"), Span(at(0), at(1)))
    lake.commit("history", [], app_id="mail", low=0, high=1, whole=whole)
    assert Lake(lake.url).owners("history") == {Whose(SHOP, "shop-first"), Whose(BILLING, "billing-a:b"), whole.whose}
    assert Lake(str(tmp_path / "none")).owners("history") == set()
