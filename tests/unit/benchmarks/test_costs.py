"""The gate of costs, as far as it needs no server: comparing, and the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from durable.errors import InvalidSetting
from tests.benchmarks.costs import __main__ as gate
from tests.benchmarks.costs import comparing
from tests.benchmarks.costs.comparing import Change, MessageCost, changes

COST = MessageCost("store", statements=1.0, commits=1.0, round_trips=3.0, wal_bytes=800.0)


@pytest.mark.parametrize(
    "now",
    [
        replace(COST, statements=1.03),
        replace(COST, round_trips=3.07),
        replace(COST, commits=0.97),
        replace(COST, wal_bytes=839.0),
    ],
)
def test_cost_within_its_tolerance_is_no_change(now: MessageCost) -> None:
    assert changes([COST], [now]) == []


def test_another_statement_grows_statements_and_round_trips() -> None:
    found = changes([COST], [replace(COST, statements=2.0, round_trips=4.0)])

    assert found == [Change("store", "statements", 1.0, 2.0), Change("store", "round_trips", 3.0, 4.0)]
    assert all(change.has_grown for change in found)


def test_smaller_wal_is_a_change_but_no_growth() -> None:
    (change,) = changes([COST], [replace(COST, wal_bytes=700.0)])

    assert (change.quantity, change.has_grown) == ("wal_bytes", False)


def test_unmeasured_work_is_not_compared() -> None:
    assert changes([COST, replace(COST, name="send")], [COST]) == []


def test_unknown_work_is_refused_with_the_way_to_renew_the_file() -> None:
    with pytest.raises(InvalidSetting, match=r"'store' is not in the file of costs; run: .*--renew"):
        changes([], [COST])


def test_renewal_keeps_the_costs_of_unmeasured_works(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    comparing.write(file, [COST, replace(COST, name="send")])

    comparing.write(file, [replace(COST, wal_bytes=900.4)])

    assert comparing.read(file) == [replace(COST, wal_bytes=900.0), replace(COST, name="send")]


@pytest.mark.parametrize("content", ["", "[]", '{"store": {"statements": 1}}', '{"store": 1}'])
def test_file_without_costs_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(content)

    with pytest.raises(InvalidSetting, match="no costs can be read"):
        comparing.read(file)


def test_committed_file_has_the_costs_of_every_work() -> None:
    assert len(comparing.read(gate.KEPT)) == 10


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (COST, 0),
        (replace(COST, statements=0.5), 0),
        (replace(COST, statements=1.5), 1),
        (replace(COST, name="other"), 2),
    ],
)
def test_exit_code_shows_whether_a_cost_has_grown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, now: MessageCost, code: int
) -> None:
    comparing.write(tmp_path / "costs.json", [COST])
    monkeypatch.setattr(gate, "KEPT", tmp_path / "costs.json")
    monkeypatch.setattr(gate, "measure", lambda *_, **__: [now])

    assert gate.main([]) == code


def test_renewed_file_holds_the_measured_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gate, "KEPT", tmp_path / "costs.json")
    monkeypatch.setattr(gate, "measure", lambda *_, **__: [COST])

    assert gate.main(["--renew"]) == 0
    assert comparing.read(tmp_path / "costs.json") == [COST]


def test_count_too_small_to_fill_groups_is_bad_use() -> None:
    with pytest.raises(SystemExit, match="2"):
        gate.main(["--count", "10"])


def test_lesser_of_two_measurements_counts() -> None:
    slow, wasteful = replace(COST, statements=1.3, round_trips=3.4), replace(COST, wal_bytes=900.0)

    assert comparing.least([slow], [wasteful]) == [COST]
