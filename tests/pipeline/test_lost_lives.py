"""What a database did in a life that it has lost is undone: the audit counts it neither as an end nor as a second one.

the receiver goes back     what it handled since is undone, until it handles it again, once
the sender goes back       what it sent since is forgotten, where a receiver has it
both go back               nothing has happened
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import lost_lives, readdressed
from durable.pipeline.archive import archive
from durable.pipeline.audit import Question, audit_here
from durable.pipeline.beginning import Wish
from durable.pipeline.choosing import Choice
from durable.pipeline.compaction import compact
from durable.pipeline.copying import connection
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, Whose
from durable.pipeline.matching import FINDINGS
from durable.pipeline.origin import Origin
from durable.pipeline.plans import plan_of
from durable.pipeline.status import read_status
from durable.pipeline.verify import Verified, claimed, verify
from durable.storage import replays
from durable.storage.rows import QUARANTINED
from tests.support.clusters import Cluster
from tests.support.command import Agent
from tests.support.history import add_history, add_letters, add_old_day, numbers
from tests.support.lakes import BILLING, SHOP, at, fill, handled, sent, table

NOTHING = dict.fromkeys(FINDINGS, 0)
SUCCESSOR = Wish(is_successor=True)


def no_spark() -> NoReturn:
    raise AssertionError("few rows need no Spark")


class Party:
    """A service, its database, which may go back to any earlier state, and its lake."""

    def __init__(self, cluster: Cluster, lake: Path, service: str, side: str) -> None:
        self.cluster, self.service, self.side = cluster, service, side
        self.lake = Lake(str(lake))
        self.states = 0
        self.database = self.copy("empty")

    def copy(self, database: str) -> str:
        self.states += 1
        name = f"{self.service}_{self.states}"
        self.cluster.execute(f"DROP DATABASE IF EXISTS {name} (FORCE)")
        self.cluster.execute(f"CREATE DATABASE {name} TEMPLATE {database}")
        return name

    def back_up(self) -> str:
        return self.copy(self.database)

    def put_back(self, backup: str) -> None:
        """The other state stays as it is."""
        self.database = self.copy(backup)

    @property
    def url(self) -> str:
        return self.cluster.uri(self.database)

    def write(self, first: int, count: int, outcome: str | None = None, **more: Any) -> None:
        outcome = outcome or ("sent" if self.side == "outgoing" else "handled")
        given: dict[str, Any] = {"address": "tcp://billing" if self.side == "outgoing" else "main"} | more
        with psycopg.connect(self.url, autocommit=True) as conn:
            add_history(conn, count, first=first, side=self.side, outcome=outcome, **given)

    def archive(self, wish: Wish | None = None) -> None:
        """Until nothing is behind: the transactions of other databases hold an archive back, too."""
        origin = Origin(url=self.url, schema="durable", service=self.service)
        for _ in range(100):
            for each in SOURCES:
                archive(no_spark, self.lake, each, origin, wish=wish or Wish())
            if not any(each.lag_rows for each in read_status(self.url, "durable", self.lake).tables):
                return
        raise AssertionError("the archive does not come to the end")

    def verified(self) -> Verified:
        origin = Origin(url=self.url, schema="durable", service=self.service)
        return verify(no_spark, self.lake, origin, claimed(origin, self.lake, "history"))

    def lost(self) -> list[int]:
        files = lost_lives.paths(self.lake, "history")
        return numbers([] if not files else lost_lives._read(self.lake, "history", files)["id"].to_pylist())


@pytest.fixture
def sender(cluster: Cluster, tmp_path: Path) -> Party:
    return Party(cluster, tmp_path / "shop", SHOP, "outgoing")


@pytest.fixture
def receiver(cluster: Cluster, tmp_path: Path) -> Party:
    return Party(cluster, tmp_path / "billing", BILLING, "incoming")


def found(sender: Party, receiver: Party) -> dict[str, list[int]]:
    """The numbers of the messages of each finding."""
    question = Question(settle=timedelta(0), archived_until=datetime.now(UTC))
    verdict = audit_here([sender.lake], [receiver.lake], question)
    assert verdict.failed == any(verdict.counts[each] for each in ("lost", "undone", "twice"))
    ids = [(row["finding"], int(row["id"].replace("-", ""), 16)) for row in verdict.examples]
    assert len(ids) == sum(verdict.counts.values())
    return {kind: sorted(n for each, n in ids if each == kind) for kind, count in verdict.counts.items() if count}


def exchange(sender: Party, receiver: Party, first: int, count: int) -> None:
    sender.write(first, count)
    receiver.write(first, count)


NEW_ADDRESS = "tcp://billing-new:2302"
PLANS = {
    "elsewhere under the same ids": (NEW_ADDRESS, True),
    "in another spelling": ("TCP://Billing-New:2302", True),
    "elsewhere under new ids": (NEW_ADDRESS, False),
    "where they went": (None, True),
    "into the own inbox": ("local", True),
}
"""Destination and --same-ids of a replay."""


@pytest.mark.parametrize("plan", PLANS)
def test_message_replayed_to_the_new_address_of_its_receiver_is_no_loss(
    sender: Party, receiver: Party, plan: str
) -> None:
    """Without such a replay, what went to two addresses is two copies of an event; and so is a later event."""
    destination, same_ids = PLANS[plan]
    exchange(sender, receiver, 100, 1)
    sender.write(0, 5)
    kept = receiver.back_up()
    receiver.write(0, 5)
    sender.archive()
    receiver.archive()
    receiver.put_back(kept)
    receiver.archive(SUCCESSOR)
    assert found(sender, receiver) == {"undone": [*range(5)]}
    begun = plan_of(
        Choice(),
        place={},
        times=dict.fromkeys(("since", "until")),
        destination=destination,
        same_ids=same_ids,
        order_by=["seq"],
    )
    with connection(sender.url) as conn:
        replays.begin(conn, "durable", "to the new host", begun)
    sender.write(0, 5, address=NEW_ADDRESS, took=timedelta(hours=1))
    sender.archive()
    is_known = plan in ("elsewhere under the same ids", "in another spelling")
    assert found(sender, receiver) == {"undone" if is_known else "lost": [*range(5)]}
    receiver.write(0, 5)
    receiver.archive()
    assert found(sender, receiver) == ({} if is_known else {"lost": [*range(5)]})
    sender.write(5, 2, took=timedelta(0))
    sender.write(5, 2, address=NEW_ADDRESS, took=timedelta(0))
    receiver.write(5, 2)
    sender.archive()
    receiver.archive()
    assert found(sender, receiver) == {"lost": [5, 6] if is_known else [*range(7)]}


def test_damaged_note_of_a_replay_is_named(sender: Party, receiver: Party) -> None:
    exchange(sender, receiver, 0, 1)
    sender.archive()
    receiver.archive()
    note = Path(sender.lake.url) / readdressed.FOLDER / "a.json"
    note.parent.mkdir()
    note.write_bytes(b"{")
    with pytest.raises(
        InvalidSetting, match=r"the note replays/a\.json of a replay cannot be read: .*; remove it, and"
    ):
        found(sender, receiver)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_command_lists_lost_rows_with_the_next_command(
    receiver: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    place = ("--lake", receiver.lake.url, "--service", BILLING)
    receiver.write(1, 2)
    receiver.archive()
    backup = receiver.back_up()
    receiver.write(3, count)
    receiver.archive()
    receiver.put_back(backup)
    receiver.write(6, 1)
    ended = agent("pipeline", "archive", "--successor", "--database", receiver.url, *place)
    assert ended.code == 0, ended.err
    lost = receiver.lost()
    assert len(lost) == count
    assert ("lost: the lake alone has these rows" in ended.out) is bool(lost)
    assert ("run: durable-agent pipeline audit" in ended.out) is bool(lost)
    again = agent("pipeline", "archive", "--successor", "--database", receiver.url, *place, "--json")
    told = json.loads(again.out)["tables"][0]["lost"]
    assert sum(told.values()) == count
    days = [str(row["finished_at"].date()) for row in lost_rows(receiver)]
    assert told == dict(sorted(Counter(days).items()))


def lost_rows(party: Party) -> list[dict[str, Any]]:
    files = lost_lives.paths(party.lake, "history")
    return lost_lives._read(party.lake, "history", files).to_pylist() if files else []


def test_message_handled_in_a_lost_life_is_undone_until_handled_again(sender: Party, receiver: Party) -> None:
    exchange(sender, receiver, 1, 2)
    sender.archive()
    receiver.archive()
    backup = receiver.back_up()
    exchange(sender, receiver, 3, 3)
    sender.archive()
    receiver.archive()
    assert found(sender, receiver) == {}
    receiver.put_back(backup)
    exchange(sender, receiver, 6, 1)  # in the new life, before the archiver knows of it
    sender.archive()
    receiver.archive(SUCCESSOR)
    assert receiver.lost() == [3, 4, 5]
    assert found(sender, receiver) == {"undone": [3, 4, 5]}
    receiver.write(3, 2)  # pipeline replay --same-ids
    receiver.archive()
    assert found(sender, receiver) == {"undone": [5]}
    receiver.write(5, 1)
    receiver.archive()
    assert found(sender, receiver) == {}
    receiver.write(5, 1)
    receiver.archive()
    assert found(sender, receiver) == {"twice": [5]}


def test_message_sent_in_a_lost_life_is_forgotten_until_sent_again(sender: Party, receiver: Party) -> None:
    exchange(sender, receiver, 1, 2)
    backups = sender.back_up(), receiver.back_up()
    exchange(sender, receiver, 3, 2)
    sender.archive()
    receiver.archive()
    sender.put_back(backups[0])
    sender.archive(SUCCESSOR)
    assert found(sender, receiver) == {"forgotten": [3, 4]}
    sender.write(3, 1)  # it was in the outbox of the backup; its receiver knows it
    sender.archive()
    assert found(sender, receiver) == {"forgotten": [4]}
    receiver.put_back(backups[1])
    receiver.archive(SUCCESSOR)
    assert found(sender, receiver) == {"undone": [3]}


def test_returned_life_is_not_lost(sender: Party, receiver: Party) -> None:
    exchange(sender, receiver, 1, 2)
    sender.archive()
    receiver.archive()
    backup = receiver.back_up()
    exchange(sender, receiver, 3, 2)
    sender.archive()
    receiver.archive()
    first = receiver.database
    receiver.put_back(backup)
    receiver.write(4, 1)
    receiver.archive(SUCCESSOR)
    assert (receiver.lost(), found(sender, receiver)) == ([3, 4], {"undone": [3]})
    receiver.database = first
    receiver.archive(SUCCESSOR)
    assert (receiver.lost(), found(sender, receiver)) == ([4], {})


def test_each_lost_life_is_known(receiver: Party) -> None:
    receiver.write(1, 2)
    receiver.archive()
    backup = receiver.back_up()
    for first in (3, 5):
        receiver.write(first, 2)
        receiver.archive()
        receiver.put_back(backup)
        receiver.archive(SUCCESSOR)
        backup = receiver.back_up()
    assert receiver.lost() == [3, 4, 5, 6]


def test_message_quarantined_in_a_lost_life_is_undone(sender: Party, receiver: Party) -> None:
    exchange(sender, receiver, 1, 1)
    receiver.archive()
    backup = receiver.back_up()
    sender.write(2, 1)
    sender.archive()
    with psycopg.connect(receiver.url, autocommit=True) as conn:
        add_letters(conn, 1, first=2)
        conn.execute("UPDATE durable.dead_letters SET exception_type = %s", (QUARANTINED,))
    receiver.write(9, 1, outcome="dead-lettered")  # of nobody
    receiver.archive()
    assert found(sender, receiver) == {"alien": [9]}
    receiver.put_back(backup)
    receiver.archive(SUCCESSOR)
    receiver.write(8, 1)
    receiver.archive()
    assert found(sender, receiver) == {"undone": [2], "alien": [8]}


def test_rows_of_before_the_history_are_not_lost(receiver: Party) -> None:
    """It goes back to before its first archive, when nodes drop days by their retention."""
    with psycopg.connect(receiver.url, autocommit=True) as conn:
        add_old_day(conn, 30, 2, first=1)
    receiver.write(3, 1)
    backup = receiver.back_up()
    receiver.write(4, 1)
    receiver.archive()
    receiver.put_back(backup)
    with psycopg.connect(receiver.url, autocommit=True) as conn:
        (name,) = conn.execute(
            "SELECT c.oid::regclass::text FROM pg_class c JOIN pg_inherits ON inhrelid = c.oid "
            "WHERE inhparent = 'durable.envelope_history'::regclass AND relname ~ '_[0-9]{8}$' ORDER BY relname LIMIT 1"
        ).fetchone() or ("",)
        conn.execute(f"DROP TABLE {name}".encode())
    receiver.archive(SUCCESSOR)
    assert receiver.lost() == [4]


@pytest.mark.parametrize("kept", [True, False])
def test_lake_without_a_list_gets_one_again(receiver: Party, tmp_path: Path, *, kept: bool) -> None:
    """It was put back to before the successor, or is of a version that made no list."""
    receiver.write(1, 2)
    receiver.archive()
    backup = receiver.back_up()
    receiver.write(3, 3)
    receiver.archive()
    shutil.copytree(receiver.lake.url, tmp_path / "kept")
    receiver.put_back(backup)
    receiver.write(6, 1)
    receiver.archive(SUCCESSOR)
    receiver.write(7, 1)
    receiver.archive()
    if kept:
        shutil.rmtree(Path(receiver.lake.url) / "lost")
    else:
        shutil.rmtree(receiver.lake.url)
        shutil.copytree(tmp_path / "kept", receiver.lake.url)
    assert receiver.lost() == []
    receiver.archive()
    assert receiver.lost() == [3, 4, 5]


def test_list_of_a_compacted_day_has_its_last_row(receiver: Party) -> None:
    """The log has its times in milliseconds."""
    receiver.write(1, 2)
    receiver.archive()
    backup = receiver.back_up()
    tomorrow = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    for number in (3, 4):
        receiver.write(number, 1, finished_at=tomorrow + timedelta(seconds=number, microseconds=456))
        receiver.archive()
    compact(receiver.lake, "history", above=1)
    receiver.put_back(backup)
    receiver.archive(SUCCESSOR)
    assert receiver.lost() == [3, 4]
    shutil.rmtree(Path(receiver.lake.url) / "lost")
    receiver.archive()
    assert receiver.lost() == [3, 4]


def test_unreadable_list_is_named_by_audit_and_verify(sender: Party, receiver: Party) -> None:
    exchange(sender, receiver, 1, 1)
    sender.archive()
    receiver.archive()
    backup = receiver.back_up()
    receiver.write(2, 1)
    receiver.archive()
    receiver.put_back(backup)
    receiver.archive(SUCCESSOR)
    (path,) = lost_lives.paths(receiver.lake, "history")
    (Path(receiver.lake.url) / path).write_bytes(b"PAR1")
    with pytest.raises(DurableError, match=rf"{path} cannot be read: .*; put it back from a backup of the lake"):
        audit_here([sender.lake], [receiver.lake], Question())
    assert [*receiver.verified().unreadable] == [path]


@pytest.mark.parametrize("lives", [("now",), ("lost",), ("now", "lost"), ("lost", "lost")], ids="-".join)
@pytest.mark.parametrize("lake_count", [1, 2])
def test_late_message_counts_once_and_in_a_living_row_alone(
    tmp_path: Path, lives: Sequence[str], lake_count: int
) -> None:
    rows = [handled(1, database="b", xid=n, deliver_by=at(1), finished_at=at(n)) for n in range(2, len(lives) + 2)]
    lost = [row for row, life in zip(rows, lives, strict=True) if life == "lost"]
    lakes = [fill(Lake(str(tmp_path / str(n))), table([sent(1), *rows])) for n in range(lake_count)]
    if lost:
        lost_lives.write(lakes[-1], "history", Whose(BILLING, "b"), table(lost))
    verdict = audit_here(lakes, lakes, Question(settle=timedelta(0)))
    assert verdict.counts["late"] == len(rows) - len(lost)
