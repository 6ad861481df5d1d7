"""A hunt finds a planted fault, writes down its input and how to run it again, and tries it first the next time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz.hunt import Hunt, hunt_for, run_again, target_of
from tests.fuzz.targets import of_rules
from tests.support.pages import ROOT


class Flawed:
    """A check that breaks at numbers above a hundred, until it is mended; then one number has a word of its own."""

    def __init__(self) -> None:
        self.tried: list[int] = []
        self.is_mended = False
        self.rare: int | None = None

    def __call__(self, number: int) -> str:
        self.tried.append(number)
        assert self.is_mended or number <= 100
        if self.rare is None and number > 1_000:
            self.rare = number
        if number == self.rare:
            return "rare"
        return "odd" if number % 2 else "even"


@pytest.fixture
def check() -> Flawed:
    return Flawed()


def hunt(check: Flawed, folder: Path) -> Hunt:
    hunt = Hunt(of_rules("flawed-numbers", st.integers(0, 1_000_000), check), check)
    hunt_for(0, hunt, folder)
    return hunt


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_hunt_writes_down_its_smallest_failing_input(check: Flawed, tmp_path: Path) -> None:
    [file] = hunt(check, tmp_path).failures
    text = file.read_text()
    assert f"run it again: .venv/bin/python -m tests.fuzz again {file}\n" in text
    assert "\ninput: 101\n" in text
    assert target_of(file) == "flawed-numbers"


def test_written_input_fails_again_and_passes_once_the_fault_is_mended(check: Flawed, tmp_path: Path) -> None:
    found = hunt(check, tmp_path)
    [file] = found.failures
    check.tried.clear()
    with pytest.raises(AssertionError):
        run_again(file, found.target, check)
    assert set(check.tried) == {101}
    check.is_mended = True
    run_again(file, found.target, check)


def test_next_hunt_begins_with_the_failing_input(check: Flawed, tmp_path: Path) -> None:
    hunt(check, tmp_path)
    check.tried.clear()
    hunt(check, tmp_path)
    assert check.tried[0] == 101


def test_corpus_keeps_an_input_for_each_word(check: Flawed, tmp_path: Path) -> None:
    check.is_mended = True
    found = hunt(check, tmp_path)
    assert found.words == {"odd", "even", "rare"}
    check.tried.clear()
    hunt(check, tmp_path)
    assert check.rare in check.tried


def test_command_hunts_a_target_and_prints_its_executions() -> None:
    done = fuzz("hunt", "0.001", "wire")
    assert done.returncode == 0
    [_, line] = done.stdout.splitlines()
    name, executions, outcomes, crashes = line.split()
    assert (name, crashes) == ("wire", "0")
    assert int(executions) > int(outcomes) > 1


def test_command_refuses_an_unknown_target() -> None:
    done = fuzz("hunt", "1", "wires")
    assert done.returncode == 2
    assert "no target 'wires'" in done.stderr
