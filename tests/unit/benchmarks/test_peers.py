"""The benchmarks beside peers, as far as they need no peer: statistics, tables, reports and environments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.errors import InvalidSetting
from tests.benchmarks.peers import sides
from tests.benchmarks.peers.processes import Process, Report, read_report
from tests.benchmarks.peers.program import Order
from tests.benchmarks.peers.sides import FLOOR, OURS, PEERS, SIDES, python_of, sides_without
from tests.benchmarks.peers.standings import JOBS_PER_SECOND, MILLISECONDS, as_markdown, percentile, standings
from tests.support.pages import DOCS, ROOT

ORDER = Order("enlist", "postgresql:///nowhere", "queue")
FAILING = replace(SIDES[0], name="failing", peer=OURS)


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(("share", "value"), [(0.5, 100), (0.99, 198), (1.0, 200), (0.0, 1)])
def test_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile(range(200, 0, -1), share) == value


def test_percentile_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_bounds_its_share_of_the_values(values: list[float], share: float) -> None:
    found = percentile(values, share)

    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


def test_best_rate_is_the_highest_and_best_time_the_lowest() -> None:
    rounds = {"durable": [100.0, 300.0, 200.0], "peer": [50.0, 150.0, 100.0]}

    (rate, _), (time, _) = (standings("work", unit, rounds, ["durable"]) for unit in (JOBS_PER_SECOND, MILLISECONDS))

    assert (rate.best, rate.median) == (300, 200)
    assert (time.best, time.median) == (100, 200)


def test_ratio_compares_the_best_rounds_of_each_side_of_durable() -> None:
    rounds = {"durable": [100.0, 300.0], "durable, auto": [600.0], "peer": [150.0, 50.0]}

    plain, auto, peer = standings("work", JOBS_PER_SECOND, rounds, ["durable", "durable, auto"])

    assert plain.ratios == auto.ratios == {}
    assert peer.ratios == {"durable": 2, "durable, auto": 4}


# ---------------------------------------------------------------- tables


def test_table_has_a_row_for_each_side_and_a_column_for_each_ratio() -> None:
    made = [
        *standings("enlist", JOBS_PER_SECOND, {"durable": [1234.5], "peer 1.0": [500.0, 700.0]}, ["durable"]),
        *standings("p50", MILLISECONDS, {"peer 1.0": [2.34]}, ["durable"]),
    ]

    assert as_markdown(made).splitlines() == [
        "| enlist | best, jobs a second | median | durable / this |",
        "| --- | --- | --- | --- |",
        "| durable | 1,234 | 1,234 | |",
        "| peer 1.0 | 700 | 600 | 1.76 |",
        "",
        "| p50 | best, ms | median |",
        "| --- | --- | --- |",
        "| peer 1.0 | 2.3 | 2.3 |",
    ]


# ---------------------------------------------------------------- programs


def test_report_is_the_last_line_of_the_output() -> None:
    output = 'a greeting\n{"package": "dbos", "version": "3.4.0", "done": 500}\n'

    assert read_report(output) == Report("dbos", "3.4.0", 500)


@pytest.mark.parametrize(
    "output", ["", "done", "[1]", '{"package": "dbos"}', '{"package": "a", "version": "1", "done": "x"}']
)
def test_output_without_a_report_is_refused(output: str) -> None:
    with pytest.raises(ValueError, match="no report of a program"):
        read_report(output)


def test_url_of_an_order_names_the_driver() -> None:
    assert ORDER.url_for("psycopg") == "postgresql+psycopg:///nowhere"


def test_failed_program_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides.Side, "module", "tests.benchmarks.peers.missing")

    with (
        Process(FAILING, ORDER) as process,
        pytest.raises(InvalidSetting, match=r"failing: enlist: .*exit code 1") as error,
    ):
        process.wait()

    assert "No module named" in str(error.value)


@pytest.mark.parametrize(
    "module", sorted((ROOT / "tests/benchmarks/peers").glob("on_*.py")), ids=lambda path: path.name
)
def test_program_of_a_peer_does_not_import_durable(module: Path) -> None:
    source = module.read_text()

    assert ("from durable" in source) == (module.name == "on_durable.py")
    assert {f"on_{peer.replace('-', '_')}.py" for peer in (*PEERS, OURS, FLOOR)} >= {module.name}


def test_frame_of_the_programs_imports_the_standard_library_only() -> None:
    code = "import sys, tests.benchmarks.peers.program as _; print({'durable', 'psycopg', 'rich'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


# ---------------------------------------------------------------- environments


def test_missing_environment_is_refused_with_the_name_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"dbos is missing: .*run scripts/peers.sh dbos, or .*--without dbos"):
        python_of("dbos", environments=tmp_path)


def test_environment_of_other_requirements_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dbos").mkdir()
    (tmp_path / "dbos" / "requirements.txt").write_text("dbos==0.1\n")

    with pytest.raises(InvalidSetting, match="dbos is old"):
        python_of("dbos", environments=tmp_path)


def test_python_of_a_made_environment_is_found(tmp_path: Path) -> None:
    (tmp_path / "dbos").mkdir()
    (tmp_path / "dbos" / "requirements.txt").write_text((sides.REQUIREMENTS / "dbos.txt").read_text())

    assert python_of("dbos", environments=tmp_path) == tmp_path / "dbos" / "bin" / "python"


def test_every_peer_has_requirements_and_a_line_in_the_docs() -> None:
    page = (DOCS / "performance.md").read_text()

    for peer in PEERS:
        pins = (sides.REQUIREMENTS / f"{peer}.txt").read_text().splitlines()
        (pin,) = (line for line in pins if line.startswith(f"{peer}=="))
        assert f"| {pin.replace('==', ' ')} |" in page


def test_peer_left_out_has_no_side() -> None:
    assert {side.peer for side in sides_without(["dbos", "celery"])} == {OURS, *PEERS} - {"dbos", "celery"}


def test_unknown_peer_to_leave_out_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="--without rq: no such peer; the peers are pgqueuer"):
        sides_without(["rq"])
