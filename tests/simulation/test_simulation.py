"""Seeds find nothing in durable, and find each bug that is planted. Each run is a process with a hash seed of its own:
sets of names are in the order of their hashes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.simulation.bugs import BUGS

_SEEDS = 200
_MOST_SEEDS = 120  # until a planted bug is found
_FRUITLESS = {
    "the fence of a handled message is ignored": 42,
    "forgotten rows are not released": 10,
    "a latch stays for ever": 3,
    "a stopping node keeps its rows": 102,
    "room of rolled back messages is not given back": 12,
    "messages are handed over before the commit": 17,
    "a dead node leaves its rows with their epoch": 11,
    "a batch is answered before it is stored": 4,
    "duplicates are stored again": 3,
}
"""Seeds from 0 on that do not find the bug: they are not tried each time."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.timeout(900)
def test_seeds_break_no_invariant() -> None:
    done = simulate("--seeds", str(_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{_SEEDS} seeds" in done.stdout
    states = re.search(r"states covered \(pairs of fault and place\): (\d+)", done.stdout)
    assert states is not None
    assert int(states[1]) >= 100


def test_seed_replays_identically() -> None:
    first, second = simulate("--seed", "31"), simulate("--seed", "31")
    assert first.returncode == 0, first.stdout + first.stderr
    assert len(first.stdout.splitlines()) > 1_000
    assert first.stdout == second.stdout


def test_seed_replays_with_some_of_its_faults() -> None:
    done = simulate("--seed", "31", "--faults", "0,2")
    assert "fault 0:" in done.stdout
    assert "fault 2:" in done.stdout
    assert "fault 1:" not in done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str) -> None:
    first = _FRUITLESS.get(bug, 0)
    seeds = ("--first", str(first), "--seeds", str(_MOST_SEEDS - first))
    done = simulate("--bug", bug, *seeds, "--failures", "1", "--whole")
    assert done.returncode == 1, f"not found within {_MOST_SEEDS} seeds\n{done.stdout}{done.stderr}"
    assert "violations: 1 seeds" in done.stdout


def test_failing_seed_is_shrunk_and_replays() -> None:
    bug = "a dead node leaves its rows with their epoch"
    first = _FRUITLESS[bug]
    done = simulate("--bug", bug, "--first", str(first), "--seeds", str(_MOST_SEEDS - first), "--failures", "1")
    told = re.search(r"fails, with (\d+) of its (\d+) faults", done.stdout)
    assert told is not None, done.stdout + done.stderr
    assert int(told[1]) < int(told[2])
    replay = re.search(r"--seed (\d+) --faults (\S+) --bug", done.stdout)
    assert replay is not None, done.stdout
    assert simulate("--seed", replay[1], "--faults", replay[2], "--bug", bug).returncode == 1
    assert simulate("--seed", replay[1], "--faults", replay[2]).returncode == 0
