"""Everything that a run needs, started: servers, proxies, pooler, broker and nodes; all of it ends with the block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.fleet import SERVICES, Fleet
from tests.chaos.ledger import ROLE
from tests.chaos.plan import DATABASE_WIRES, Plan, server_names
from tests.chaos.profiles import Profile
from tests.chaos.roads import Road, road
from tests.chaos.servers import Server, servers
from tests.chaos.wires import Wire
from tests.support.pooler import Pooler, own_pooler

POOLED_CONNECTIONS = 16
URL = "DURABLE_DATABASE_URL"


@dataclass(frozen=True)
class Stage:
    """What faults happen to, by the names of the plan."""

    folder: Path
    servers: dict[str, Server]
    wires: dict[str, Wire]
    road: Road
    fleet: Fleet
    poolers: dict[str, Pooler]

    @property
    def calm(self) -> Path:
        """The file that ends the producers."""
        return self.folder / "calm"

    def server_of(self, service: str) -> Server:
        return self.servers.get(service) or self.servers["both"]

    def services_of(self, server: str) -> tuple[str, ...]:
        return SERVICES if server == "both" else (server,)

    def lead_wires_to(self, server: str) -> None:
        """Lead the nodes to where this server is now."""
        for service in self.services_of(server):
            for what in DATABASE_WIRES:
                self.wires[f"{service} {what}"].lead_to(self.servers[server].target)

    def replace_poolers(self) -> list[str]:
        """Start poolers again that have ended by themselves, and return what they said last."""
        ended = [each for each in self.poolers.values() if each.has_ended() and not each.expected_away]
        for each in ended:
            each.start()
        return [f"PgBouncer has ended by itself: {each.said().splitlines()[-1]}" for each in ended]

    def restore(self) -> None:
        """End what proxies do."""
        for wire in self.wires.values():
            wire.restore()


@asynccontextmanager
async def staged(
    plan: Plan, profile: Profile, transport: str, folder: Path, program: str = "tests.chaos.node"
) -> AsyncIterator[Stage]:
    """`program`: module that runs as a node."""
    async with AsyncExitStack() as stack:
        started = stack.enter_context(servers(*server_names(profile)))
        way = await stack.enter_async_context(road(transport, folder, plan.is_secured))
        wires = dict(way.wires)
        environments: dict[str, dict[str, str]] = {}
        poolers: dict[str, Pooler] = {}
        for service in SERVICES:
            server = started.get(service) or started["both"]
            await asyncio.to_thread(server.make_database, service)
            for what in DATABASE_WIRES:
                wire = Wire(f"{service} {what}", server.target)
                wires[wire.name] = await stack.enter_async_context(wire)
            environments[service] = {
                **way.environments[service],
                **profile.environment,
                "DURABLE_LOCK_DATABASE_URL": _through(wires[f"{service} lock"], service),
                URL: _through(wires[f"{service} pool"], service),
                "CHAOS_CALM": str(folder / "calm"),
                "CHAOS_PAUSE": str(profile.producer_pause),
                "CHAOS_DELAYS": profile.retry_delays,
            }
            if plan.pooled == service:
                # In a thread: it waits for an answer that comes through a proxy of this one.
                context = own_pooler(environments[service][URL], server_connections=POOLED_CONNECTIONS)
                poolers[f"{service} pooler"] = await asyncio.to_thread(stack.enter_context, context)
                environments[service][URL] = poolers[f"{service} pooler"].url
        fleet = Fleet(folder, environments, program)
        stack.callback(fleet.end)
        fleet.start_all()
        yield Stage(folder, started, wires, way, fleet, poolers)


def _through(wire: Wire, database: str) -> str:
    return f"postgresql://{ROLE}@127.0.0.1:{wire.port}/{database}"
