"""The nodes of both services as child processes, and what can be done to them.

A child is in a process group of its own, so that Ctrl-C reaches only the demo, which then ends its children in good
order. When the demo itself is killed, the children see the end of their stdin and end; one that is stopped then gets
SIGHUP, because its process group is orphaned.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from durable.errors import DurableError

SERVICES = ("airline", "punctuality")
SLOTS = 2
"""Nodes of each service."""
STOP_SECONDS = 15.0

# What takes seconds by default takes less here, so that the demo is short.
HURRIED = {
    "DURABLE_HEARTBEAT_INTERVAL": "0.5",
    "DURABLE_HEARTBEAT_STALE": "2",
    "DURABLE_DORMANT_GRACE": "1",
    "DURABLE_SWEEP_INTERVAL": "0.5",
    "DURABLE_POLL_INTERVAL": "0.3",
    "DURABLE_FORGOTTEN_AFTER": "4",
    "DURABLE_CONNECT_TIMEOUT": "2",
    "DURABLE_SEND_TIMEOUT": "3",
    "DURABLE_PING_INTERVAL": "0.3",
}


class NodeEnded(DurableError):
    """A node ended though nobody had ended it."""


@dataclass(eq=False)
class Member:
    """A child process that is a node, or is about to join."""

    service: str
    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)
    node_id: int | None = None
    paused: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_working(self) -> bool:
        return self.node_id is not None and not self.paused

    def __str__(self) -> str:
        node = f"node {self.node_id}, " if self.node_id is not None else ""
        return f"{self.service}/{self.slot} ({node}pid {self.pid})"


class Fleet:
    """The children. One for each service and slot at any time."""

    def __init__(self, folder: Path, environments: Mapping[str, dict[str, str]]) -> None:
        self.members: list[Member] = []
        self._folder = folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")}
        self._environments = {service: inherited | HURRIED | own for service, own in environments.items()}

    def start(self, service: str, slot: int) -> Member:
        log = self._folder / f"{service}-{slot}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "durable.demo.node", service, str(slot), str(SLOTS)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environments[service],
                process_group=0,
            )
        member = Member(service, slot, process, log)
        self.members.append(member)
        return member

    def working(self, service: str) -> list[Member]:
        """Return the nodes that have joined and are not paused."""
        return [member for member in self.members if member.service == service and member.is_working]

    def kill(self, member: Member) -> None:
        """Kill a node by SIGKILL, as the kernel does when memory is short."""
        member.process.kill()
        member.process.wait()
        self._forget(member)

    def pause(self, member: Member) -> None:
        member.process.send_signal(signal.SIGSTOP)
        member.paused = True

    def resume(self, member: Member) -> None:
        member.process.send_signal(signal.SIGCONT)
        member.paused = False

    def check(self) -> None:
        """Raise NodeEnded when one ended by itself."""
        for member in self.members:
            code = member.process.poll()
            if code is not None:
                raise NodeEnded(f"{member} ended by itself with code {code}; see {member.log}")

    def stop(self) -> None:
        """End all, in good order as far as they do within STOP_SECONDS."""
        for member in self.members:
            self.resume(member)
            member.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for member in list(self.members):
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            self._forget(member)

    def _forget(self, member: Member) -> None:
        self.members.remove(member)
        if member.process.stdin is not None:
            member.process.stdin.close()


@contextmanager
def running(folder: Path, environments: Mapping[str, dict[str, str]]) -> Iterator[Fleet]:
    """A fleet with every slot taken; at the end all of it is gone, whatever happened."""
    fleet = Fleet(folder, environments)
    try:
        for service in environments:
            for slot in range(SLOTS):
                fleet.start(service, slot)
        yield fleet
    finally:
        fleet.stop()
