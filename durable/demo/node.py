"""Node of a service as a process: `python -m durable.demo.node airline 0 2`.

What an application would have in `durable-agent run app:bus`; here also the end with the demo, however that ends,
and counts in a file, so that something is known of nodes that are killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path

from durable import Bus
from durable.demo import airline, punctuality

COUNT_SECONDS = 0.2
"""The greatest age of the written counts of a killed node."""


def main() -> None:
    service, slot, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with_the_demo, name="watch the demo", daemon=True).start()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    asyncio.run(_serve_airline(slot, slots) if service == "airline" else _serve(punctuality.bus))


def _end_with_the_demo() -> None:
    """The demo holds the other end of stdin and never writes: end of file means that it is gone."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


async def _serve_airline(slot: int, slots: int) -> None:
    environment = os.environ
    work = airline.record_share(
        Path(environment["AIRLINE_FLIGHTS"]),
        share=slot,
        shares=slots,
        pause_seconds=float(environment["AIRLINE_PAUSE_SECONDS"]),
    )
    await _serve(airline.bus, work)


async def _serve(bus: Bus, work: Coroutine[None, None, None] | None = None) -> None:
    """Run the node, and what the service does by itself, until SIGTERM."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    async with bus, asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(_keep_counts(bus), name="keep counts")
        working = tasks.create_task(work, name="work") if work is not None else None
        await asked.wait()
        counting.cancel()
        _write_counts(bus)
        if working is not None:
            working.cancel()


async def _keep_counts(bus: Bus) -> None:
    while True:
        _write_counts(bus)
        await asyncio.sleep(COUNT_SECONDS)


def _write_counts(bus: Bus) -> None:
    """Write the counts of the agents into the file of this process, which is replaced whole."""
    file = Path(os.environ["COUNTS_FOLDER"]) / f"{bus.service}-{os.getpid()}.json"
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(dict(bus.runtime.counters.snapshot())))
    draft.replace(file)


if __name__ == "__main__":
    main()
