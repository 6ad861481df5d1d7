"""The nodes as child processes. Each is in a process group of its own, and ends when this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from durable.process.last_resort import EXIT_NO_MEMBER, EXIT_STUCK
from tests.support.root import ROOT

SERVICES = ("orders", "billing")
SLOTS = 2
STOP_SECONDS = 60.0
LAST_RESORTS = (EXIT_STUCK, EXIT_NO_MEMBER)


@dataclass(eq=False)
class Member:
    """A child; `expected_away` while a fault has ended it, or stopped it by a signal."""

    service: str
    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    expected_away: bool = False
    is_paused: bool = False
    resumed: float = field(default=0.0)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def name(self) -> str:
        return f"{self.service}/{self.slot}"


class Fleet:
    """One child for each service and slot."""

    def __init__(self, folder: Path, environments: Mapping[str, Mapping[str, str]], program: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")}
        self._environments = {name: inherited | dict(own) for name, own in environments.items()}
        self._folder = folder
        self._program = program
        self.members: dict[str, Member] = {}
        self.ended_by_themselves: list[str] = []
        self.complaints: list[str] = []
        self.started = 0

    def start(self, service: str, slot: int) -> Member:
        log = self._folder / f"{service}-{slot}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", self._program, service, str(slot)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=self._environments[service],
                process_group=0,
            )
        self.started += 1
        member = Member(service, slot, process, log)
        self.members[member.name] = member
        return member

    def start_all(self) -> None:
        for service in SERVICES:
            for slot in range(SLOTS):
                self.start(service, slot)

    def kill(self, member: Member) -> None:
        member.expected_away = True
        member.process.kill()
        self._reap(member)

    def pause(self, member: Member) -> None:
        member.is_paused = True
        member.process.send_signal(signal.SIGSTOP)

    def resume(self, member: Member) -> None:
        member.process.send_signal(signal.SIGCONT)
        member.is_paused = False
        member.resumed = time.time()

    def replace_ended(self) -> None:
        """Start a process again that has ended by itself, as a supervisor of services would."""
        for member in list(self.members.values()):
            code = member.process.poll()
            if code is not None and not member.expected_away:
                found = f"{member.name} ended with {code}: {_last_line(member.log)}"
                self.ended_by_themselves.append(found)
                if code in LAST_RESORTS:
                    self.complaints.append(found)
                self._reap(member)
                self.start(member.service, member.slot)

    def stop(self) -> list[str]:
        """End all in good order. Returns a sentence for each process that did not end as it should, also before."""
        for member in self.members.values():
            if member.process.poll() is None:
                self.resume(member)
                member.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        found = list(self.complaints)
        for member in self.members.values():
            try:
                code: int | str = member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = f"SIGKILL after {STOP_SECONDS:g} s"
                member.process.kill()
            self._reap(member)
            if code != 0 and not member.expected_away:
                found.append(f"{member.name} ended with {code} after SIGTERM: {_last_line(member.log)}")
        self.members = {}
        return found

    def end(self) -> None:
        """Kill what is left."""
        for member in self.members.values():
            member.process.kill()
            self._reap(member)
        self.members = {}

    def _reap(self, member: Member) -> None:
        member.process.wait()
        if member.process.stdin is not None:
            member.process.stdin.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:200] if lines else "no line of log"
