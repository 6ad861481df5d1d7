"""The transport of docs/transports.md, and its tests: copied into a folder as a reader would, and run there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from durable.testing.transports import DirectContract

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page, and a configuration of pytest that knows nothing of this repository's."""
    for path in (ROOT / "docs" / "examples" / "lines").glob("*.py"):
        shutil.copy(path, tmp_path)
    settings = "asyncio_default_fixture_loop_scope = function\naddopts = -p no:schemathesis -p no:xdist\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    return f"{done.stdout}\n{done.stderr}\nexit status {done.returncode}"


def test_the_documented_transport_passes_the_whole_suite(folder: Path) -> None:
    output = run(folder, "pytest", "-q", "-W", "error")

    tests = sum(name.startswith("test_") for name in dir(DirectContract))
    assert f"\n{tests} passed in" in output, output


def test_suite_finds_an_answer_before_the_commit_and_shows_the_comparison(folder: Path) -> None:
    code = (folder / "lines.py").read_text()
    careless = code.replace(
        "await receiver.receive(self.endpoint, fitting) if fitting",
        "await self._too_early(receiver, fitting) if fitting",
    )
    assert careless != code
    (folder / "lines.py").write_text(careless.replace("    async def _store(", TOO_EARLY + "\n    async def _store("))

    output = run(folder, "pytest", "-q", "-k", "failed_at_the_receiver or follows_the_storing")

    assert "2 failed" in output, output
    assert "assert [Stored(), Stored()] == [Failed(" in output, output


def test_bus_in_memory_needs_no_pytest(folder: Path) -> None:
    (folder / "without.py").write_text(
        "import sys\nsys.modules['pytest'] = None\nimport durable.testing\nprint(durable.testing.InMemoryBus.__name__)"
    )
    assert run(folder, "without").startswith("InMemoryBus\n")


TOO_EARLY = """
    async def _too_early(self, receiver: Receiver, batch: list[Envelope]) -> list[Outcome]:
        from durable.outcomes import STORED

        task = asyncio.create_task(receiver.receive(self.endpoint, batch))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return [STORED] * len(batch)
"""
