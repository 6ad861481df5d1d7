"""Rehearsals of a dead letter: its handler runs in a process of its own, and is rolled back.

The process is `durable-agent dead-letters ... --rehearse --json`. So a handler that hangs, or blocks its event loop,
holds up no page, and a bus that runs in this process is left alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta
from typing import Any, Final

from durable.errors import DurableError

_MOST_AT_ONCE: Final = 2
_START_SECONDS: Final = 30.0
_LARGEST_OUTPUT: Final = 16 * 1024 * 1024
_LONGEST_ERROR: Final = 1_000


class RehearsalFailed(DurableError):
    """The rehearsal told nothing about the letter: its process did not come so far."""


class Rehearsals:
    """Rehearsals with the handlers of an application, which is written `app:bus`; without one there are none."""

    def __init__(self, app: str | None, handler_timeout: timedelta) -> None:
        self.app = app
        self._seconds = handler_timeout.total_seconds() + _START_SECONDS
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)

    async def run(self, letter: int, body: str | None = None) -> dict[str, Any]:
        """Return what a replay would do, as `--rehearse --json` shows it. Raises RehearsalFailed."""
        if self.app is None:
            raise RehearsalFailed(
                f"this console was not told where the application is; run: durable-agent dead-letters replay APP:BUS "
                f"{letter} --rehearse"
            )
        if self._room.locked():
            raise RehearsalFailed(f"{_MOST_AT_ONCE} rehearsals are under way already; try again when one has ended")
        verb, given = ("replay", []) if body is None else ("edit", ["--body", "-"])
        async with self._room:
            return await self._run([verb, self.app, str(letter), *given, "--rehearse", "--json"], body)

    async def _run(self, arguments: list[str], body: str | None) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "durable.cli",
            "dead-letters",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=os.getcwd(),
            limit=_LARGEST_OUTPUT,
        )
        try:
            async with asyncio.timeout(self._seconds):
                told, complaint = await process.communicate((body or "").encode())
        except TimeoutError:
            raise RehearsalFailed(f"the rehearsal was not over after {self._seconds:g} s, and was ended") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return _read(told, complaint)


def _read(told: bytes, complaint: bytes) -> dict[str, Any]:
    """Read the document that the command ends with; the handler may have printed before it."""
    _, begin, rest = (b"\n" + told).rpartition(b"\n{\n")
    try:
        document = json.loads(begin + rest)
        if "error" in document:
            raise RehearsalFailed(str(document["error"])[:_LONGEST_ERROR])
        found: dict[str, Any] = document["rehearsed"][0]
        return found
    except (ValueError, KeyError, TypeError, IndexError):
        text = complaint.decode(errors="replace").strip() or "it said nothing"
        raise RehearsalFailed(text[-_LONGEST_ERROR:]) from None
