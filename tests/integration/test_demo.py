"""The demo, run as a user runs it, with fewer flights: what it says is true, and it says so when something is wrong."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from durable.demo.mishaps import Kind, plan
from durable.demo.verdict import Totals, differences

ROOT = Path(__file__).parents[2]

RUN = """
import sys
from pathlib import Path
from durable.demo import run_demo, stage, supervisor, verdict

flights, output, keep = sys.argv[1:]
if output == "tampered":
    gather = verdict.gather

    def tampered(observer, **facts):
        observer.rows("punctuality", TAMPER)
        return gather(observer, **facts)

    verdict.gather = tampered
    supervisor.plan = lambda flights, rng: []  # nothing else happens in this one, and it is short
    stage.SHORTEST_SECONDS = 0

TAMPER = '''
UPDATE delays SET arrival_minutes = arrival_minutes + 1 WHERE (carrier, added_by) = (
    SELECT carrier, added_by FROM delays WHERE carrier = 'UA' LIMIT 1) RETURNING carrier
'''
folder = Path(keep) if keep else None
sys.exit(run_demo(flights=int(flights), all_flights=False, json_output=output == "json", seed=7, keep=folder))
"""


def command(flights: int, output: str, keep: Path | str = "") -> list[str]:
    return [sys.executable, "-c", RUN, str(flights), output, str(keep)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a server has its socket in it."""
    path = Path(tempfile.mkdtemp(prefix="durable-kept-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_every_total_is_right_though_nodes_are_killed_and_paused() -> None:
    done = subprocess.run(command(1_500, "json"), cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)  # and nothing besides
    assert document["equal"]
    assert document["ours"] == document["expected"]
    assert (document["sent"], document["handled"]) == (1_500, 1_500)
    assert (document["lost"], document["twice"]) == ([], [])
    assert min(document["kills"].values()) >= 2
    (pause,) = document["pauses"]
    assert pause["owned"] > 0
    assert pause["seconds"] > pause["dormant_after_seconds"] > 0
    assert pause["finished_late"] == 0
    assert document["recovered_outgoing"] > 0
    assert document["recovered_incoming"] > 0


def test_a_total_that_is_off_by_a_minute_is_shown_and_the_folder_is_kept(folder: Path) -> None:
    done = subprocess.run(command(300, "tampered", folder), cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    off = re.search(r"^UA: arrival minutes (-?\d+), should be (-?\d+)$", done.stdout, re.MULTILINE)
    assert off is not None, done.stdout
    assert int(off[1]) == int(off[2]) + 1
    assert "The totals differ." in done.stdout
    assert str(folder) in done.stderr
    assert (folder / "data" / "PG_VERSION").exists()
    assert "joined" in (folder / "logs" / "airline-0.log").read_text()


def test_an_interrupted_demo_leaves_no_process_behind() -> None:
    with subprocess.Popen(command(5_000, "text"), cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if "joined" in line)
        children = psutil.Process(demo.pid).children()
        nodes = [child for child in children if "durable.demo.node" in child.cmdline()]
        demo.send_signal(signal.SIGINT)
        demo.wait(60)

    assert demo.returncode == -signal.SIGINT  # as Python ends with a KeyboardInterrupt
    assert len(nodes) == 4
    assert [node for node in nodes if node.is_running()] == []


def test_a_seed_repeats_its_plan_with_kills_on_both_sides_and_a_pause() -> None:
    planned = plan(20_000, random.Random(7))

    assert planned == plan(20_000, random.Random(7)) != plan(20_000, random.Random(8))
    assert Counter((mishap.service, mishap.kind) for mishap in planned) == {
        ("airline", Kind.KILL): 2,
        ("punctuality", Kind.KILL): 2,
        ("punctuality", Kind.PAUSE): 1,
    }
    assert all(0 < mishap.at < 0.8 for mishap in planned)


def test_every_wrong_number_is_a_difference() -> None:
    right = {"UA": Totals(10, 1, 55, -7), "AA": Totals(3, 0, 0, 0)}

    assert differences(right, right) == []
    assert differences({"UA": Totals(10, 1, 54, -7), "AA": Totals(3, 0, 0, 0)}, right) == [
        "UA: departure minutes 54, should be 55"
    ]
    assert differences({"UA": Totals(10, 1, 55, -7)}, right) == ["AA: flights 0, should be 3"]
    assert differences({**right, "B6": Totals(1, 1, 0, 0)}, right) == [
        "B6: flights 1, should be 0",
        "B6: cancelled 1, should be 0",
    ]
