"""What is seen while the run goes on: memory of the nodes, and nodes that were struck off though they were well."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import psycopg

from tests.chaos.fleet import SERVICES, Member
from tests.chaos.plan import Fault
from tests.chaos.stage import Stage

LOOK_SECONDS = 0.5
AFTERMATH_SECONDS = 15.0
"""Time after a fault for which a node may still be struck off because of it."""
NODES = "SELECT node_id, CAST(split_part(description, ':', 2) AS integer) FROM durable.nodes"


@dataclass
class Happened:
    """A fault, and the times (of the epoch) between which it was there."""

    fault: Fault
    began: float
    ended: float = 0.0


@dataclass
class Watch:
    """Seen so far."""

    stage: Stage
    happened: list[Happened] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    false_deaths: list[str] = field(default_factory=list)
    poolers_ended: list[str] = field(default_factory=list)
    _known: dict[tuple[str, int], int] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            self.stage.fleet.replace_ended()
            self.poolers_ended += self.stage.replace_poolers()
            for member in self.stage.fleet.members.values():
                self.peak_bytes[member.name] = max(self.peak_bytes.get(member.name, 0), _peak(member.pid))
            for service in SERVICES:
                await self._look_at_nodes(service)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_at_nodes(self, service: str) -> None:
        try:
            rows = await asyncio.to_thread(self._nodes, service)
        except psycopg.Error:
            return  # its server is away
        by_pid = {member.pid: member for member in self.stage.fleet.members.values()}
        for (known, node_id), pid in list(self._known.items()):
            if known != service or node_id in rows:
                continue
            del self._known[known, node_id]
            if pid in by_pid and not self._is_explained(by_pid[pid]):
                self.false_deaths.append(f"node {node_id} of {by_pid[pid].name}")
        self._known.update({(service, node_id): pid for node_id, pid in rows.items()})

    def _nodes(self, service: str) -> dict[int, int]:
        with self.stage.server_of(service).connect(service) as conn:
            return dict(conn.execute(NODES).fetchall())

    def _is_explained(self, member: Member) -> bool:
        """True when a fault of late may have ended this membership: of the node, its database, or its wires."""
        now = time.time()
        return any(
            not each.ended or each.ended > now - AFTERMATH_SECONDS
            for each in self.happened
            if each.fault.place in (member.name, "both") or each.fault.place.split()[0] == member.service
        )


def _peak(pid: int) -> int:
    """The largest resident memory of a process so far; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            found = [line for line in status if line.startswith("VmHWM")]
    except OSError:
        return 0
    return int(found[0].split()[1]) << 10 if found else 0
