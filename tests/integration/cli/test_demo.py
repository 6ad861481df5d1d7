"""The demo, run as a user runs it, with fewer flights: what it says is true, and it says so when something is wrong."""

from __future__ import annotations

import json
import os
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
from typing import Any

import httpx
import psutil
import pytest

from durable.demo.mishaps import Mishap, MishapKind, plan
from durable.demo.outages import AWAY_SECONDS
from durable.demo.verdict import Totals, differences
from tests.support.command import heed_interrupts

ROOT = Path(__file__).parents[3]


RUN = """
import sys
from pathlib import Path
from durable.demo import run_demo, stage, supervisor, verdict

transport, flights, output, keep = sys.argv[1:]
if output == "tampered":
    gather = verdict.gather

    def tampered(observer, **facts):
        observer.rows("punctuality", TAMPER)
        return gather(observer, **facts)

    verdict.gather = tampered
    supervisor.plan = lambda flights, rng, has_broker: []  # nothing else happens in this one, and it is short
    stage.SHORTEST_SECONDS = 0

TAMPER = '''
UPDATE delays SET arrival_minutes = arrival_minutes + 1 WHERE (carrier, added_by) = (
    SELECT carrier, added_by FROM delays WHERE carrier = 'UA' LIMIT 1) RETURNING carrier
'''
folder = Path(keep) if keep else None
options = {"flights": int(flights), "all_flights": False, "json_output": output == "json", "seed": 7}
sys.exit(run_demo(transport=transport, keep=folder, **options))
"""


def command(flights: int, output: str, *, transport: str = "tcp", keep: Path | str = "") -> list[str]:
    return [sys.executable, "-c", RUN, transport, str(flights), output, str(keep)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a server has its socket in it."""
    path = Path(tempfile.mkdtemp(prefix="durable-kept-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("transport", ["tcp", "http"])
def test_demo_totals_are_right_when_nodes_are_killed_and_paused(transport: str) -> None:
    document = played(transport)

    all_is_right(document)
    assert document["broker_away_seconds"] == []


def test_demo_totals_are_right_when_the_broker_is_killed_too() -> None:
    document = played("rabbitmq")

    all_is_right(document)
    assert document["broker_away_seconds"]
    assert min(document["broker_away_seconds"]) > AWAY_SECONDS
    latched = [latch for latch in document["latched"] if latch["service"] == "airline"]
    assert latched
    assert all(latch["key"].startswith("rabbitmq://default/") and latch["reason"] for latch in latched)


def played(transport: str) -> Any:
    """The JSON document of a run that ended well."""
    arguments = command(1_500, "json", transport=transport)
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    document = json.loads(done.stdout)  # and nothing besides
    assert document["transport"] == transport
    return document


def all_is_right(document: Any) -> None:
    assert document["equal"]
    assert document["ours"] == document["expected"]
    assert (document["sent"], document["handled"]) == (1_500, 1_500)
    assert (document["lost"], document["twice"]) == ([], [])
    assert min(document["kills"].values()) >= 2
    (pause,) = document["pauses"]
    assert pause["owned"] > 0
    assert pause["seconds"] > pause["dormant_after_seconds"] > 0
    assert pause["finished_late"] == 0
    assert document["recovered_outgoing"] >= document["in_hand"]["airline"]
    assert document["recovered_incoming"] >= document["in_hand"]["punctuality"] >= pause["owned"]


def test_demo_shows_a_wrong_total_and_keeps_the_folder(folder: Path) -> None:
    done = subprocess.run(command(300, "tampered", keep=folder), cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    off = re.search(r"^UA: arrival minutes (-?\d+), should be (-?\d+)$", done.stdout, re.MULTILINE)
    assert off is not None, done.stdout
    assert int(off[1]) == int(off[2]) + 1
    assert "The totals differ." in done.stdout
    assert str(folder) in done.stderr
    assert (folder / "data" / "PG_VERSION").exists()
    assert "joined" in (folder / "logs" / "airline-0.log").read_text()


def told(process: psutil.Process) -> dict[str, Any]:
    """The name and command of a process, which are empty when it has ended meanwhile."""
    try:
        found: dict[str, Any] = process.as_dict(["name", "cmdline"], ad_value="")
    except psutil.NoSuchProcess:
        return {"name": "", "cmdline": ()}
    return found


@pytest.mark.parametrize(
    ("transport", "number", "returncode"),
    [
        ("tcp", signal.SIGINT, -signal.SIGINT),  # as Python ends with a KeyboardInterrupt
        ("rabbitmq", signal.SIGINT, -signal.SIGINT),
        ("rabbitmq", signal.SIGTERM, -signal.SIGINT),
        ("rabbitmq", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_demo_leaves_no_process_behind_when_ended(transport: str, number: int, returncode: int, folder: Path) -> None:
    arguments = command(5_000, "text", transport=transport, keep=folder)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(arguments, cwd=ROOT, preexec_fn=heed_interrupts, **streams) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if "joined" in line)
        children = [(child, told(child)) for child in psutil.Process(demo.pid).children(recursive=True)]
        nodes = [child for child, about in children if "durable.demo.node" in about["cmdline"]]
        brokers = [child for child, about in children if about["name"] == "beam.smp"]
        databases = [psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))]
        demo.send_signal(number)
        demo.wait(60)

    assert demo.returncode == returncode
    assert (len(nodes), len(brokers)) == (4, 1 if transport == "rabbitmq" else 0)
    assert (folder / "rabbitmq" / "rabbit.log").exists() == (transport == "rabbitmq")
    _, left = psutil.wait_procs(nodes + brokers + databases, timeout=20)
    assert left == []


def test_demo_reports_a_missing_broker_before_starting_servers(folder: Path) -> None:
    kept = folder / "kept"
    arguments = [sys.executable, "-m", "durable.cli", "demo", "--transport", "rabbitmq", "--keep", str(kept)]
    done = subprocess.run(
        arguments, cwd=ROOT, env=os.environ | {"PATH": str(folder)}, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "rabbitmq-server" in done.stderr
    assert not kept.exists()


def test_plan_repeats_kills_and_a_pause_when_the_seed_is_the_same() -> None:
    planned = plan(20_000, random.Random(7), has_broker=False)

    assert planned == plan(20_000, random.Random(7), has_broker=False)
    assert planned != plan(20_000, random.Random(8), has_broker=False)
    assert kinds(planned) == {
        ("airline", MishapKind.KILL): 2,
        ("punctuality", MishapKind.KILL): 2,
        ("punctuality", MishapKind.PAUSE): 1,
    }
    assert all(0 < mishap.at < 0.8 for mishap in planned)


def test_plan_adds_only_outages_when_there_is_a_broker() -> None:
    without = plan(130_000, random.Random(7), has_broker=False)
    planned = plan(130_000, random.Random(7), has_broker=True)

    assert kinds(planned) - kinds(without) == {("punctuality", MishapKind.OUTAGE): 3}
    assert [mishap for mishap in planned if mishap.kind is not MishapKind.OUTAGE] == without
    assert all(0 < mishap.at < 0.8 for mishap in planned)


def kinds(planned: list[Mishap]) -> Counter[tuple[str, MishapKind]]:
    return Counter((mishap.service, mishap.kind) for mishap in planned)


def test_differences_include_every_wrong_number() -> None:
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


def test_console_of_the_demo_shows_both_services() -> None:
    arguments = [sys.executable, "-m", "durable.cli", "demo", "--flights", "300", "--seed", "7", "--console"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        told = next(found for line in process.stdout if (found := re.search(r"console: (\S+) token: (\S+)", line)))
        headers = {"authorization": f"Bearer {told[2]}"}
        response = httpx.get(told[1], headers=headers, follow_redirects=True)
        assert response.status_code == 200
        assert ('href="/airline/"' in response.text, 'href="/punctuality/"' in response.text) == (True, True)
        rest = process.stdout.read()
    assert ("none lost, none twice" in rest, process.returncode) == (True, 0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(told[1])
