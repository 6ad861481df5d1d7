"""services, call: the contracts of the application, as the addresses that they are called at have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from durable.bus import Bus
from durable.calls.caller import RemoteService
from durable.calls.contract import Contract, Method
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.calls.telemetry import TRAFFIC, Traffic
from durable.cli.arguments import ListSize, parse_duration
from durable.cli.output import Table, emit
from durable.cli.providers import Registered, registered
from durable.cli.send import read_body
from durable.cli.target import on_bus
from durable.errors import CallFailed, InvalidMessage, InvalidSetting, TransportError
from durable.grammar import suggestion
from durable.listed import SHOWN
from durable.messages.unknown_fields import refuse_unknown_fields
from durable.transports.base import Caller
from durable.transports.frames import Call, Offers, Result

Called = Annotated[str, typer.Argument(metavar="SERVICE.METHOD", help="such as Inventory.reserve")]
Arguments = Annotated[str, typer.Argument(metavar="JSON", help="arguments by their names; - reads standard input")]
At = Annotated[str | None, typer.Option("--at", metavar="URI", help="address to call instead of the application's")]
Timeout = Annotated[str | None, typer.Option("--timeout", metavar="TIME", help="longest wait: 5, 30s, 2m")]

_SCHEMES = ("tcp://", "unix://")
_HERE = "this process"
_TRAFFIC_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A contract at an address. `problem` says why it cannot be called there."""

    service: str
    version: str
    role: str
    address: str
    offered: str | None
    methods: list[str]
    problem: str | None
    traffic: Traffic | None = None
    """Of the process that answered."""


@on_bus()
def services(bus: Bus, limit: ListSize = SHOWN) -> None:
    """Show the services that the application offers and calls, as their addresses offer them now, and all providers
    in the registry of its database.

    Calls, their 99th percentile and failures are those of the process that answered, in the last 30 to 60 seconds. Ends
    with 1 when one of the services cannot be called there, or has no provider that fits.
    """
    known = registered(bus)
    seen = [*asyncio.run(_seen(bus)), *_sought(bus, known)]
    problems = [f"{each.service} at {each.address}: {each.problem}" for each in seen if each.problem is not None]
    table = Table.of(
        "services",
        seen,
        {
            "service": "service",
            "version": "version",
            "the application": "role",
            "address": "address",
            "offered": lambda each: each.offered or "no",
            "methods": lambda each: len(each.methods),
            "calls/s": lambda each: each.traffic and f"{each.traffic.calls / each.traffic.seconds:.1f}",
            "p99": lambda each: each.traffic and _within(each.traffic),
            "failed": lambda each: each.traffic and each.traffic.failed,
        },
    )
    document = {"healthy": not problems, "problems": problems, "services": [msgspec.to_builtins(each) for each in seen]}
    shown = [table, *problems] if seen else ["no service is offered or called"]
    emit({**document, **known.document(limit)}, *shown, *known.blocks(limit))
    if problems:
        raise typer.Exit(1)


@on_bus()
def call(bus: Bus, method: Called, arguments: Arguments = "{}", at: At = None, timeout: Timeout = None) -> None:
    """Call a method of a service that the application offers or calls, and print its result."""
    contract, name = _named(bus, method)
    called = contract.methods[name]
    place = at or _address(bus, contract)
    if place is None:
        raise InvalidSetting(f"--at: {contract.name} has no address here; give one, such as --at tcp://127.0.0.1:2304")
    seconds = bus.settings.call_timeout if timeout is None else parse_duration(timeout, option="--timeout")
    try:
        body = read_body(arguments, bus.settings.max_frame_bytes)
        given = called.read_json(body)
    except InvalidMessage as error:
        raise InvalidSetting(f"JSON: the arguments of {called.full_name} {error}") from error
    try:
        refuse_unknown_fields(body, given, called.full_name)
    except InvalidMessage as error:
        raise InvalidSetting(f"JSON: {error}") from error
    options = {} if timeout is None else {name: {"timeout": seconds}}
    result = asyncio.run(_call(bus, contract, called, given, place, options))
    document = called.result.plain(result)
    emit(document, _shown(document))


async def _call(
    bus: Bus, contract: Contract, method: Method, given: dict[str, Any], at: str, options: dict[str, Any]
) -> Any:
    errors: list[CallFailed] = []
    links = Links(lambda uri: bus.runtime.transports.of(uri))
    links.check(at)
    remote = RemoteService(
        contract,
        Elsewhere(at, lambda: links),
        timeout=bus.settings.call_timeout.total_seconds(),
        options=options,
        on_error=errors.append,
    )
    try:
        result = await getattr(remote.stub(), method.name)(**given)
        await remote.finish()
    finally:
        await links.close()
    if errors:
        raise errors[0]
    return result


async def _seen(bus: Bus) -> list[Seen]:
    links = Links(lambda uri: bus.runtime.transports.of(uri))
    try:
        return await asyncio.gather(
            *(_look(links, contract, role, at) for contract, role, at in _contracts(bus) if at != _HERE)
        )
    finally:
        await links.close()


def _sought(bus: Bus, known: Registered) -> list[Seen]:
    """The contracts that are called at whichever provider is best, and not offered by the application itself."""
    seen: list[Seen] = []
    for contract, role, at in _contracts(bus):
        if at == _HERE and contract.name not in {each.name for each in bus.application.offers.contracts}:
            methods = [each.text for each in contract.offer.signatures]
            versions = {each.version for each in known.providers if each.service == contract.name}
            problem = known.problem(contract)
            offered = ", ".join(sorted(versions)) or None
            seen.append(Seen(contract.name, contract.version, role, "any provider", offered, methods, problem))
    return seen


async def _look(links: Links, contract: Contract, role: str, at: str) -> Seen:
    methods = [each.text for each in contract.offer.signatures]
    try:
        caller = await links.to(at)
        offers = await caller.offers()
        traffic = await _traffic(caller)
    except TransportError as error:
        return Seen(contract.name, contract.version, role, at, None, methods, f"no answer: {error}")
    version = _version(offers, contract.name)
    problem: str | None = None
    try:
        contract.check(next((each for each in offers.offers if each.service == contract.name), None), at)
    except CallFailed as error:
        problem = str(error)
    found = next((each for each in traffic if each.service == contract.name), None)
    return Seen(contract.name, contract.version, role, at, version, methods, problem, found)


async def _traffic(caller: Caller) -> list[Traffic]:
    """Ask a provider for its traffic. One that does not know, or may not tell, tells nothing."""
    try:
        async with asyncio.timeout(_TRAFFIC_SECONDS):
            answer = await caller.call(Call(TRAFFIC, "recent", b"", _TRAFFIC_SECONDS), lambda: None)
        return msgspec.msgpack.decode(answer.body, type=list[Traffic]) if isinstance(answer, Result) else []
    except (TimeoutError, msgspec.MsgspecError):
        return []


def _within(traffic: Traffic) -> str:
    return f"{traffic.p99 * 1_000:g} ms" if traffic.p99 is not None else ""


def _version(offers: Offers, name: str) -> str | None:
    return next((each.version for each in offers.offers if each.service == name), None)


def _contracts(bus: Bus) -> Sequence[tuple[Contract, str, str]]:
    """Each contract of the application, its role there, and an address of it."""
    listening = [each.uri for each in bus.application.listeners if each.uri.startswith(_SCHEMES)]
    offered = [(contract, "offers it", uri) for contract in bus.application.offers.contracts for uri in listening]
    called = [(contract, "calls it", at or _HERE) for contract, at in bus.application.called]
    return list(dict.fromkeys([*offered, *called]))


def _named(bus: Bus, text: str) -> tuple[Contract, str]:
    service, _, name = text.rpartition(".")
    known = {contract.name: contract for contract in _known(bus)}
    by_name = {**known, **{contract.cls.__name__: contract for contract in known.values()}}
    if service not in by_name:
        near = suggestion(service, by_name) or f"; known: {', '.join(sorted(by_name)) or 'none'}"
        raise InvalidSetting(f"SERVICE.METHOD: {text!r} is no service of the application{near}")
    contract = by_name[service]
    if name not in contract.methods:
        near = suggestion(name, contract.methods) or f"; known: {', '.join(contract.methods)}"
        raise InvalidSetting(f"SERVICE.METHOD: {contract.name} has no method {name!r}{near}")
    return contract, name


def _known(bus: Bus) -> list[Contract]:
    return [*bus.application.offers.contracts, *(contract for contract, _ in bus.application.called)]


def _address(bus: Bus, contract: Contract) -> str | None:
    """Return the address at which the application calls the service, or else offers it."""
    found = [(role, at) for known, role, at in _contracts(bus) if known == contract and at != _HERE]
    return next((at for _, at in sorted(found)), None)


def _shown(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
