"""Checks of the application: its handlers, its addresses, and whether peers answer."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from urllib.parse import urlsplit

from durable.bus import Bus
from durable.cli.doctor.checks import Check, fail, ok, warn
from durable.cli.doctor.remedies import remedy
from durable.cli.doctor.topology import topology_checks
from durable.cli.output import age
from durable.errors import DurableError, InvalidSetting, TransportError
from durable.transports.plaintext import is_loopback

_PING_SECONDS = 3.0


def application_checks(bus: Bus) -> list[Check]:
    addresses = [_address(bus, "listener", listening.uri) for listening in bus.application.listeners]
    # Brokers before destinations: a ping makes the sender declare its exchange, if that is missing.
    return [
        retention(bus),
        handlers(bus),
        *plaintext(bus),
        *addresses,
        *topology_checks(bus),
        *asyncio.run(_destinations(bus)),
    ]


def retention(bus: Bus) -> Check:
    """Check that duplicates are recognised for longer than a message may be retried."""
    window = bus.settings.dedupe_window
    horizons = {name: bus.application.policy(handler).horizon for name, handler in bus.application.handlers.items()}
    longest = max(horizons.values(), default=timedelta(0))
    detail = f"dedupe_window is {age(window)}, the longest retries take {age(longest)}"
    if longest >= window:
        names = ", ".join(name for name, horizon in horizons.items() if horizon >= window)
        return fail("retention", detail, f"raise dedupe_window, or shorten the retries of {names}")
    return ok("retention", detail)


def handlers(bus: Bus) -> Check:
    """Check the return types and codecs of handlers; parameters were checked at their declaration."""
    count = len(bus.application.handlers)
    try:
        bus.application.check(bus.runtime.envelope_factory)
    except DurableError as error:
        return fail("handlers", str(error), "correct the handler: a node would not start")
    if bus.application.listeners and not count:
        return warn("handlers", "none, although the bus listens", "declare @bus.handles(...), or import its modules")
    return ok("handlers", f"{count}, with all their parameters")


def plaintext(bus: Bus) -> list[Check]:
    """Warn of connections that others can read; none where the settings refuse them."""
    if not bus.settings.allow_plaintext:
        return []
    listening = (each.uri for each in bus.application.listeners)
    addresses = {shown for uri in (*bus.application.destinations(), *listening) if (shown := _if_plaintext(uri))}
    brokers = {"default": bus.settings.amqp_url, **bus.settings.amqp_brokers}
    addresses |= {
        f"rabbitmq://{name}" for name, url in brokers.items() if url and _if_plaintext(url.get_secret_value())
    }
    detail = ", ".join(sorted(addresses)) or "no such address is declared"
    return [
        warn(
            "plaintext",
            f"allow_plaintext is set, so everybody on the way can read: {detail}",
            "use https:// and amqps://, and remove allow_plaintext",
        )
    ]


def _if_plaintext(uri: str) -> str:
    """The address of another host that is reached without encryption, or nothing."""
    parts = urlsplit(uri)
    return uri if parts.scheme in ("http", "amqp") and not is_loopback(parts.hostname or "") else ""


def _address(bus: Bus, kind: str, uri: str) -> Check:
    try:
        bus.runtime.transports.of(uri)
    except InvalidSetting as error:
        return fail(kind, str(error), "correct the address")
    return ok(kind, uri)


async def _destinations(bus: Bus) -> list[Check]:
    return list(await asyncio.gather(*(_ping(bus, uri) for uri in bus.application.destinations())))


async def _ping(bus: Bus, uri: str) -> Check:
    """Ping a destination as a latched one is pinged: up to the peer's database."""
    checked = _address(bus, "destination", uri)
    if checked.advice:
        return checked
    try:
        async with asyncio.timeout(_PING_SECONDS), bus.runtime.transports.of(uri).sender(uri) as sender:
            await sender.ping()
    except InvalidSetting as error:
        return fail("destination", str(error), "correct the address")
    except (TransportError, TimeoutError) as error:
        reason = str(error) or f"{uri}: no answer within {_PING_SECONDS:g} seconds"
        return warn("destination", reason, f"{remedy(error)}; until then messages wait in the outbox")
    return ok("destination", f"{uri} answers")
