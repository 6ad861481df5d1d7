"""A workload in a world, step by step, and the record of it.

Not in the record, because nothing promises it: times; the order of messages without a key; how many messages of a
group share a transaction, and so how often such a handler is entered; ids that are drawn at random.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from durable.envelope import Envelope
from durable.errors import DurableError
from durable.outbox.outbox import Outbox
from durable.requests.receipts import receipt_of
from durable.storage.receipts import Standing
from tests.differential.arriving import again, arriving
from tests.differential.messages import Plain, Question, Unrouted
from tests.differential.services import SERVICES
from tests.differential.workload import (
    TOGETHER,
    Advance,
    Arrive,
    Ask,
    Change,
    Item,
    Pause,
    Refused,
    Resolve,
    Resume,
    Unit,
    Where,
    Workload,
)
from tests.differential.worlds import World, handler_of

Record = list[Any]
"""One entry for each step: plain data."""

_UUID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d(?::?\d\d)?)?")
_FAR: Final = datetime(2500, 1, 1, tzinfo=UTC)


async def run(workload: Workload, world: World) -> Record:
    """Run the workload in this world, which is entered and left."""
    async with world:
        return await _Run(workload, world).steps()


class _Run:
    def __init__(self, workload: Workload, world: World) -> None:
        self._steps = workload.steps
        self._world = world
        self._arrived: dict[int, Envelope] = {}
        self._items = {item.number: item for item in items_of(workload)}

    async def steps(self) -> Record:
        record: Record = []
        for step in self._steps:
            came_to = await self._do(step)
            await self._world.settle()
            seen = {where: await self._seen(where) for where in SERVICES}
            record.append({"result": came_to, **seen})
        record.append({"ids": self._ids(), "entries": self._entries()})
        return record

    # ------------------------------------------------------------------ steps

    async def _do(self, step: Any) -> Any:
        match step:
            case Unit():
                return await self._unit(step)
            case Refused():
                return await self._refused(step)
            case Advance():
                await self._world.advance(timedelta(seconds=step.seconds))
            case Pause():
                times = {} if step.seconds is None else {"for_": step.seconds}
                await self._world.pause(step.at, **self._target(step), **times)
            case Resume():
                target = self._target(step)
                return await self._world.bus(step.at).resume(target.pop("cls", None), **target)
            case Change():
                return await self._change(step)
            case Arrive():
                await self._arrive(step)
            case Ask():
                return await self._world.bus("here").run_schedule(step.name)
            case Resolve():
                await self._resolve(step)
            case _:
                raise TypeError(f"unknown step: {step}")
        return None

    async def _unit(self, step: Unit) -> Any:
        """Send each message; those that are undone come last, in a savepoint."""
        shop, told = self._world.services["here"], list[str]()

        def send(outbox: Outbox, *, undone: bool) -> None:
            for item in step.items:
                if item.is_undone == undone:
                    try:
                        shop.send(outbox, item)
                    except DurableError as error:
                        told.append(f"#{item.number} {self._told(error)}")

        try:
            await self._world.transact(
                lambda outbox: send(outbox, undone=False), lambda outbox: send(outbox, undone=True), step.end
            )
        except LookupError as error:
            told.append(self._told(error))
        return told

    async def _refused(self, step: Refused) -> Any:
        told: list[str] = []

        def send(outbox: Outbox) -> None:
            try:
                self._fault(step.fault, outbox)
            except Exception as error:  # the record compares whatever is raised
                told.append(self._told(error))
            else:
                told.append("nothing was raised")
            self._world.services["here"].send(outbox, step.item)

        try:
            await self._world.transact(send, lambda _: None, "commit")
        except DurableError as error:
            told.append(self._told(error))
        return told

    def _fault(self, fault: str, outbox: Any) -> None:
        plain, there = Plain(0), self._world.addresses["there"]
        match fault:
            case "misspelt":
                outbox.send(plain, dealy=60)
            case "at and delay":
                outbox.send(plain, at=_FAR, delay=60)
            case "never due":
                outbox.send(plain, delay=60, deliver_by=30)
            case "empty key":
                outbox.send(plain, key="")
            case "long key":
                outbox.send(plain, key="k" * 1_001, to=there)
            case "control key":
                outbox.send(plain, key="a\nb")
            case "business key":
                outbox.send(plain, id_from="\t")
            case "naive time":
                outbox.send(plain, at=datetime(2500, 1, 1))
            case "wrong delay":
                outbox.send(plain, delay="soon")
            case "large body":
                outbox.send(Plain(0, ["x" * 1_100_000]), to=there)
            case "wrong field":
                outbox.send(Plain("one"))  # type: ignore[arg-type]
            case "no route":
                outbox.send(Unrouted())
            case "no transport":
                outbox.send(plain, to="carrier-pigeon://roof")
            case "no message":
                outbox.send(object())
            case "distant":
                outbox.send(plain, to=there, delay="8d")
            case "reply to":
                outbox.send(plain, reply_to="nowhere")
            case "headers":
                outbox.send(plain, headers={"a": 1})
            case "reserved header":
                outbox.send(plain, headers={"durable-due": "now"})
            case "empty tenant":
                outbox.send(plain, tenant="")
            case "outside":
                self._world.bus("there").send(plain)
            case "past calendar":
                outbox.send(plain, delay=timedelta(days=3_000_000))
            case "local reply":
                outbox.send(plain, to=there, reply_to="local")
            case "unexpected answer":
                outbox.request(Question(0), Plain)
            case other:
                raise ValueError(f"unknown fault: {other}")

    def _target(self, step: Pause | Resume) -> dict[str, Any]:
        if step.kind == "lane":
            return {"cls": handler_of(step.name)}
        name = self._world.addresses["there"] if step.kind == "destination" else step.name
        return {step.kind: name}

    async def _change(self, step: Change) -> Any:
        message_id, bus = self._world.notes.sent.get(step.number), self._world.bus("here")
        if message_id is None:
            return "never sent"
        try:
            match step.verb:
                case "cancel":
                    return await bus.cancel(message_id)
                case "run now":
                    return await bus.run_now(message_id)
                case "reschedule":
                    return await bus.reschedule(message_id, delay=step.seconds)
        except DurableError as error:
            return self._told(error)

    async def _arrive(self, step: Arrive) -> None:
        notes, destination = self._world.notes, self._world.addresses["there"]
        if step.repeats is not None:
            if step.repeats not in self._arrived:
                return
            envelope = again(self._arrived[step.repeats], is_other=step.is_other)
        else:
            envelope = arriving(step.kind, step.number, destination=destination, now=self._world.now())
            self._arrived[step.number] = envelope
            if envelope.id.int:
                notes.name(envelope.id, Item(step.number))
        await self._world.arrive(envelope)

    async def _resolve(self, step: Resolve) -> None:
        notes = self._world.notes
        if step.is_mended:
            notes.mended |= {step.number} if step.number is not None else set(self._items)
        ids = None
        if step.number is not None:
            if step.number not in notes.sent:
                return
            ids = [notes.sent[step.number]]
        await self._world.resolve(step.at, step.verb, ids)

    # ------------------------------------------------------------------ what is seen

    async def _seen(self, where: Where) -> dict[str, Any]:
        world, name = self._world, self._world.notes.named
        ids = list(world.notes.names)
        receipts = self._receipts(await world.standings(where, ids))
        letters = [(name(each.id), *each[1:4], self._shown(each.reason), *each[5:7]) for each in world.letters(where)]
        waiting = [(name(each.id), *each[1:]) for each in world.waiting(where)]
        effects = world.effects(where)
        return {
            "receipts": sorted(receipts, key=str),
            "letters": sorted(letters, key=str),
            "waiting": sorted(waiting, key=str),
            "effects": sorted(effects),
            "orders": self._orders(where, [number for number, _ in effects]),
            "answered": sorted(str(name(each)) for each in await world.answered(where, ids)),
        }

    def _receipts(self, standings: list[Standing]) -> Iterator[tuple[Any, ...]]:
        """Return each delivery of messages that wait nowhere, as a receipt tells of it."""
        by_id: dict[UUID, list[Standing]] = defaultdict(list)
        for each in standings:
            by_id[each.id].append(each)
        for message_id, places in by_id.items():
            receipt = receipt_of(places)
            for end in receipt.deliveries if receipt else ():
                about = (end.side, self._shown(end.address), end.outcome, self._shown(end.reason))
                yield (self._world.notes.named(message_id), *about, end.attempts)

    def _orders(self, where: Where, numbers: list[int]) -> dict[str, list[int]]:
        """Return the messages of each order, as they were handled."""
        orders: dict[str, list[int]] = defaultdict(list)
        for number in numbers:
            item = self._items.get(number, Item(number))
            if item.lane == "whole":
                orders["whole"].append(number)
            elif item.key is not None:
                orders[item.key].append(number)
        return dict(sorted(orders.items()))

    def _ids(self) -> dict[str, int]:
        """Count the ids of each message: one, whichever attempt has sent it."""
        listed = {item.number for item in self._items.values() if item.lane == "listed"}
        below = {each.number for number in listed for each in _below(self._items[number])}
        ids = self._world.notes.ids
        return {name: len(found) for name, found in sorted(ids.items()) if name not in {f"#{each}" for each in below}}

    def _entries(self) -> list[Any]:
        """Return each entry into a handler of single messages."""
        entries = self._world.notes.entries
        alone = [each for each in entries if each[1] in self._items and self._items[each[1]].lane not in TOGETHER]
        return sorted(([self._shown(part) for part in each] for each in alone), key=str)

    def _told(self, error: Exception) -> str:
        return f"{type(error).__name__}: {self._shown(str(error))}"

    def _shown(self, value: Any) -> Any:
        """Replace ids, times and addresses by names."""
        if isinstance(value, list | tuple):
            return [self._shown(each) for each in value]
        if not isinstance(value, str):
            return value
        value = value.replace("memory://, ", "")  # a transport of tests, which only some of the worlds have
        for where, address in self._world.addresses.items():
            value = value.replace(address, f"<{where}>")
        value = _UUID.sub(lambda found: f"<{self._world.notes.named(UUID(found.group()))}>", value)
        return _TIME.sub("<time>", value)


def items_of(workload: Workload) -> list[Item]:
    """Return all messages of a workload, those that handlers send too."""
    first = [item for step in workload.steps if isinstance(step, Unit) for item in step.items]
    first += [step.item for step in workload.steps if isinstance(step, Refused)]
    return [each for item in first for each in (item, *_below(item))]


def _below(item: Item) -> list[Item]:
    return [each for child in item.sends for each in (child, *_below(child))]


def difference(expected: Record, found: Record) -> list[str]:
    """Return the first step in which two records differ, line by line."""
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        lines = list(_differences(f"step {number}", msgspec.to_builtins(one), msgspec.to_builtins(other)))
        if lines:
            return lines
    return []


def _differences(place: str, one: Any, other: Any) -> list[str]:
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted({*one, *other}, key=str)
        return [line for name in names for line in _differences(f"{place}, {name}", one.get(name), other.get(name))]
    if isinstance(one, list) and isinstance(other, list) and sorted(map(str, one)) != sorted(map(str, other)):
        missing = [each for each in one if one.count(each) > other.count(each)]
        added = [each for each in other if other.count(each) > one.count(each)]
        return [f"{place}: - {each}" for each in missing] + [f"{place}: + {each}" for each in added]
    return [f"{place}: - {one}", f"{place}: + {other}"]
