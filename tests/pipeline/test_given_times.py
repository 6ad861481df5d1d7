"""The first and the last times that a command line can give: every command reckons with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from durable.pipeline.audit import Question, audit_here
from durable.pipeline.lake import Lake
from durable.storage.days import within_reach
from durable.storage.sql.times import FIRST, LAST
from tests.support.command import Agent
from tests.support.lakes import fill, handled, letter, sent, table

TIMES: Final = ("0001-01-01T00:00Z", "9999-12-31T23:59:59.999999Z")
DAYS: Final = ("0001-01-01", "9999-12-31")
LONG: Final = "36500d"
AUDIT: Final = ("audit", "--sender", "lake", "--receiver", "lake")
REPLAY: Final = ("replay", "--name", "x", "--dry-run", "--from", "dead-letters")
LOCAL: Mapping[str, Sequence[Sequence[str]]] = {
    "audit": [
        *((*AUDIT, option, time) for option in ("--until", "--archived-until") for time in TIMES),
        (*AUDIT, "--since", TIMES[0]),
        *((*AUDIT, "--archived-until", time, "--settle", LONG) for time in TIMES),
        (*AUDIT, "--since", TIMES[0], "--until", TIMES[1], "--late-after", LONG),
        (*AUDIT, "--settle", LONG),
    ],
    "conversations": [("conversations", option, day) for option in ("--since", "--until") for day in DAYS],
    "vacuum": [("vacuum", "--keep", "36500")],
}
"""Commands that few rows let run without Spark."""
ON_SPARK: Mapping[str, Sequence[Sequence[str]]] = {
    "audit": [(*call, "--master", "local[2]") for call in LOCAL["audit"][:5]],
    "conversations": [(*call, "--master", "local[2]") for call in LOCAL["conversations"]],
    "replay": [(*REPLAY, option, time) for option in ("--since", "--until") for time in TIMES],
    "report": [
        *(("report", "--out", "page.html", option, day) for option in ("--since", "--until") for day in DAYS),
        *(("report", "--out", "page.html", "--mark", f"{time}=a mark") for time in TIMES),
    ],
}


@pytest.fixture
def agent(
    spark: SparkSession,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Agent:
    """In the folder of a lake with two messages and a letter."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    monkeypatch.setenv("DURABLE_LAKE", str(tmp_path / "lake"))
    lake = Lake(str(tmp_path / "lake"))
    fill(lake, table([sent(1), handled(1), sent(2), handled(2)]))
    fill(lake, table([letter(3)], "dead_letters"), of="dead_letters")
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("calls", "name"), [*product([LOCAL], LOCAL), *product([ON_SPARK], ON_SPARK)])
def test_command_reckons_with_the_first_and_the_last_times(
    agent: Agent, calls: Mapping[str, Sequence[Sequence[str]]], name: str
) -> None:
    for call in calls[name]:
        ended = agent("pipeline", *call)
        assert ended.code == 0 or "no history of these days" in ended.err, (call, ended)


@pytest.mark.parametrize("since", [TIMES[1], "0d", "2999-12-31T00:00Z", "9999-12-31T23:59:59Z"])
def test_audit_of_a_time_ahead_is_refused(agent: Agent, since: str) -> None:
    ended = agent("pipeline", *AUDIT, "--since", since)
    assert ended.code == 2
    assert f"--since: {since} is not in the past" in ended.err


def test_audit_of_a_quiet_time_says_so_and_passes(agent: Agent) -> None:
    ended = agent("pipeline", *AUDIT, "--since", "1s ago")
    assert (ended.code, ended.err) == (0, "")
    assert "nothing was judged" in ended.out


ELSEWHERE: Final = [
    *(("dead-letters", "list", option, time) for option in ("--since", "--until") for time in TIMES),
    *(("scheduled", "list", "--due-before", time) for time in TIMES),
    *(("actions", option, time) for option in ("--since", "--until") for time in TIMES),
]


@pytest.mark.parametrize("call", ELSEWHERE, ids=" ".join)
def test_list_reckons_with_the_first_and_the_last_times(agent: Agent, call: Sequence[str]) -> None:
    ended = agent(*call)
    assert (ended.code, ended.err) == (0, ""), ended


@given(st.datetimes(timezones=st.just(UTC)))
def test_question_takes_every_time_to_one_within_reach(moment: datetime) -> None:
    question, other = Question(since=moment, archived_until=moment), Question(until=moment)
    (found,) = {question.since, other.until, question.archived_until}
    assert found is not None
    assert FIRST <= found <= LAST + timedelta(microseconds=1)
    assert found == moment or not FIRST <= moment <= LAST


@pytest.mark.parametrize("sent_at", [FIRST, LAST])
def test_message_of_the_first_or_last_time_is_judged(tmp_path: Path, sent_at: datetime) -> None:
    rows = [row | {"sent_at": sent_at} for row in (sent(1), handled(1))]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows))
    since, until = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    assert within_reach(since) <= sent_at < within_reach(until)
    assert audit_here([lake], [lake], Question(since=since, until=until, settle=timedelta(0))) is not None
