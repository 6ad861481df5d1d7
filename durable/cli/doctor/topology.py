"""Checks of RabbitMQ brokers: whether queues and exchanges exist as the application declares them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from durable.bus import Bus
from durable.cli.doctor.checks import Check, fail, ok, warn
from durable.cli.topology import explained, needed, survey
from durable.errors import InvalidSetting, TransportError
from durable.transports.rabbitmq.topology import Exchange, Queue, Topology

if TYPE_CHECKING:
    from durable.transports.rabbitmq.declaring import Found

_NAME = "topology"


def topology_checks(bus: Bus) -> list[Check]:
    """Check each broker; none for an application without rabbitmq:// addresses."""
    try:
        brokers = needed(bus)
    except InvalidSetting as error:
        return [_failed(error)]
    return asyncio.run(_inspect(bus, brokers))


async def _inspect(bus: Bus, brokers: dict[str, Topology]) -> list[Check]:
    return [check for name, topology in brokers.items() for check in await _broker(bus, name, topology)]


async def _broker(bus: Bus, name: str, topology: Topology) -> list[Check]:
    try:
        seen = await survey(bus, name, topology)
    except (InvalidSetting, TransportError) as error:
        return [_failed(error)]
    if not seen.problems:
        return [ok(_NAME, f"exchanges and queues on rabbitmq://{name} exist as declared ({len(seen.found)})")]
    return [_problem(thing, found) for thing, found in seen.found.items() if found.state != "present"]


def _problem(thing: Exchange | Queue, found: Found) -> Check:
    """Warn of a missing queue, which the listener declares at its start; fail a refused one, which stops it."""
    detail, _, advice = explained(thing, found).partition("; ")
    return warn(_NAME, detail, advice) if found.state == "missing" else fail(_NAME, detail, advice)


def _failed(error: InvalidSetting | TransportError) -> Check:
    detail, _, advice = str(error).rpartition("; ")
    return fail(_NAME, detail or advice, advice if detail else "correct the address, or the setting")
