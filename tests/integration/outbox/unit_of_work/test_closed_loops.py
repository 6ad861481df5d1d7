"""A node whose event loop was closed, without the end of its bus, in a process that goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_process_goes_on_after_the_loop_of_its_node_was_closed(database_url: str, driver: str) -> None:
    """Commits return, the node's heartbeat ends, its rows are handled, and the bus starts again."""
    program = [sys.executable, "-m", "tests.integration.outbox.unit_of_work.closed_loop", database_url, driver]

    done = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"handled": [1, 2, 3, 4], "nodes": 0}
    assert done.stderr.count("its event loop was closed before the bus was stopped") == 1
