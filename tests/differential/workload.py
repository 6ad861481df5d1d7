"""Workloads: the steps that a test takes, and the messages that it sends, as plain data.

Times are whole hundreds of seconds, and deadlines fifty above them: no time that a machine needs for a run brings a
message to the other side of its deadline.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from tests.differential.arriving import ARRIVALS

Where = Literal["here", "there"]
"""Service of a handler: `here` is the one that sends, `there` its peer."""


class Item(msgspec.Struct, omit_defaults=True):
    """A message: how it is sent, and what becomes of its attempts."""

    number: int
    lane: str = "plain"
    to: Where = "here"
    key: str | None = None
    tenant: str | None = None
    delay: int | None = None
    deliver_by: int | None = None
    business_key: str | None = None
    is_undone: bool = False
    """True if the savepoint that it is sent in is rolled back."""
    script: list[str] = []
    """Ends of its first attempts; the later ones succeed."""
    sends: list[Item] = []
    """Messages that each attempt sends."""


class Unit(msgspec.Struct, tag="unit", omit_defaults=True):
    """A transaction that sends."""

    items: list[Item]
    end: Literal["commit", "rollback", "raise"] = "commit"


class Refused(msgspec.Struct, tag="refused"):
    """A transaction with a send that is refused, by the name of its fault, between two others."""

    fault: str
    item: Item


class Advance(msgspec.Struct, tag="advance"):
    """Time passes."""

    seconds: int


class Pause(msgspec.Struct, tag="pause", omit_defaults=True):
    """Pause the handler of a lane, a key, or the way to the peer."""

    kind: Literal["lane", "key", "destination"]
    name: str
    at: Where = "here"
    seconds: int | None = None


class Resume(msgspec.Struct, tag="resume", omit_defaults=True):
    """Resume the handler of a lane, a key, or the way to the peer."""

    kind: Literal["lane", "key", "destination"]
    name: str
    at: Where = "here"


class Change(msgspec.Struct, tag="change", omit_defaults=True):
    """Cancel, hasten or put off a message that waits for its time."""

    verb: Literal["cancel", "run now", "reschedule"]
    number: int
    seconds: int = 0


class Resolve(msgspec.Struct, tag="resolve", omit_defaults=True):
    """Replay or discard the dead letters of a message, or of all; those that are mended succeed from then on."""

    verb: Literal["replay", "discard"]
    at: Where = "here"
    number: int | None = None
    is_mended: bool = False


class Arrive(msgspec.Struct, tag="arrive", omit_defaults=True):
    """An envelope of a stranger comes to the peer: by the name of its kind, or one that has come before, again."""

    kind: str
    number: int
    repeats: int | None = None
    is_other: bool = False
    """True if its body is another than that of the one which it repeats."""


class Ask(msgspec.Struct, tag="ask", omit_defaults=True):
    """Run the schedule, besides its occurrences."""

    name: str = "yearly"


Step = Arrive | Ask | Unit | Refused | Advance | Pause | Resume | Change | Resolve


class Workload(msgspec.Struct, omit_defaults=True):
    """The steps of a run, in order, and the way in which it was drawn."""

    steps: list[Step]
    seed: int | None = None


LANES: Final = (
    *("plain", "plain", "plain", "parked", "grouped", "listed", "auto", "whole", "fair", "sync", "secret", "strict"),
    *("aged", "old", "event", "question", "stranger", "guided", "guarded"),
)
_SHARED: Final = frozenset(("whole", "guarded"))
"""Lanes whose messages touch each other: what handlers that run side by side send into them has no order."""
TOGETHER: Final = frozenset(("grouped", "listed", "auto"))
"""Lanes whose handlers share a transaction: how many share it is not promised."""
KEYS: Final = ("k1", "k2")
TENANTS: Final = ("acme", "gold")
ENDS: Final = (
    *("raise", "raise", "raise", "lookup", "os", "reject", "later", "put back", "rollback", "unrouted", "no message"),
    *("no reply", "panic", "refused", "release", "upcaster", "commit", "close", "returns"),
)
ALONE: Final = frozenset(("release", "returns"))
"""Ends of handlers of one message."""
FAULTS: Final = (
    *("misspelt", "at and delay", "never due", "empty key", "long key", "control key", "business key", "naive time"),
    *("wrong delay", "large body", "wrong field", "no route", "no transport", "no message", "distant", "reply to"),
    *("headers", "reserved header", "empty tenant", "outside", "past calendar", "local reply", "unexpected answer"),
)


def drawn(seed: int, length: int = 12) -> Workload:
    """Draw the workload of a seed, of about so many steps."""
    return Workload(_Drawing(Random(seed)).steps(length), seed)


class _Drawing:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._count = 0
        self._depth = 0
        self._arrived: list[int] = []
        self._put_off: list[int] = []
        self._keyed: list[Item] = []
        self._paused: list[Pause] = []

    def steps(self, length: int) -> list[Step]:
        steps: list[Step] = [self._unit()]
        while len(steps) < length:
            steps.append(self._step())
        steps += [Resume(pause.kind, pause.name, pause.at) for pause in self._paused]
        steps += [Resume("key", key, where) for key in KEYS for where in ("here", "there")]
        return [*steps, Advance(400)]

    def _step(self) -> Step:
        draw = self._rng.random()
        if draw < 0.38:
            return self._unit()
        if draw < 0.45:
            return self._arrival()
        if draw < 0.65:
            return Advance(100 * self._rng.choice((1, 1, 2, 3)))
        if draw < 0.67:
            return Ask()
        if draw < 0.72:
            return Refused(self._rng.choice(FAULTS), self._item(0))
        if draw < 0.82:
            return self._circuit()
        if draw < 0.90:
            verb: Any = self._rng.choice(("cancel", "run now", "reschedule"))
            number = self._rng.choice([*self._put_off, *self._put_off, self._rng.randint(1, self._count)])
            return Change(verb, number, 100 * self._rng.randint(1, 3))
        chosen = None if self._rng.random() < 0.6 else self._rng.randint(1, self._count)
        resolution: Any = self._rng.choice(("replay", "replay", "discard"))
        return Resolve(resolution, self._where(), chosen, self._rng.random() < 0.5)

    def _circuit(self) -> Step:
        if self._paused and self._rng.random() < 0.5:
            pause = self._paused.pop(self._rng.randrange(len(self._paused)))
            return Resume(pause.kind, pause.name, pause.at)
        kind: Any = self._rng.choice(("lane", "key", "destination"))
        name = {"lane": self._rng.choice(LANES), "key": self._rng.choice(KEYS), "destination": "there"}[kind]
        where = "here" if kind == "destination" else self._where()
        seconds = 150 if self._rng.random() < 0.3 else None
        pause = Pause(kind, "aged" if name in ("old", "stranger") else name, where, seconds)
        self._paused.append(pause)
        return pause

    def _arrival(self) -> Arrive:
        self._count += 1
        if self._arrived and self._rng.random() < 0.4:
            return Arrive("whole", self._count, self._rng.choice(self._arrived), self._rng.random() < 0.4)
        self._arrived.append(self._count)
        return Arrive(self._rng.choice(sorted(ARRIVALS)), self._count)

    def _where(self) -> Where:
        return "here" if self._rng.random() < 0.5 else "there"

    def _unit(self) -> Unit:
        end: Any = self._rng.choices(("commit", "rollback", "raise"), (0.86, 0.07, 0.07))[0]
        items = [self._item(0) for _ in range(self._rng.choice((1, 1, 2, 3, 5)))]
        if self._keyed and self._rng.random() < 0.3:
            items.append(self._again(self._rng.choice(self._keyed)))
        self._put_off += [item.number for item in items if item.delay is not None]
        self._keyed += [item for item in items if item.business_key is not None]
        guarded = [item for item in items if item.lane == "guarded"]
        return Unit([item for item in items if item not in guarded[1:]], end)

    def _again(self, item: Item) -> Item:
        """Draw a message under the business key of another, with the same words or its own."""
        self._count += 1
        if self._rng.random() < 0.3:
            return replace(item, number=self._count, delay=None, deliver_by=None, sends=[])
        return Item(self._count, item.lane, item.to, business_key=item.business_key)

    def _item(self, parent: int) -> Item:
        """Draw a message; `parent` is the number of the one whose handler sends it, or 0.

        Handlers run side by side, so that messages of several of them share no key.
        """
        rng = self._rng
        self._count += 1
        lane = rng.choice([each for each in LANES if not (parent and each in _SHARED)])
        item = Item(self._count, lane, "there" if lane == "stranger" else self._where())
        if lane == "guarded":
            item.to = "here"
        of_parent = f"-{parent}" if parent else ""
        if rng.random() < 0.4:
            item.key = rng.choice(KEYS) + of_parent
        if lane == "fair" or rng.random() < 0.1:
            item.tenant = rng.choice(TENANTS)
        if rng.random() < 0.2:
            item.delay = 100 * rng.randint(1, 3)
        if rng.random() < 0.2:
            item.deliver_by = 100 * rng.randint(0, 4) + 50 + (item.delay or 0)
        if rng.random() < 0.15:
            item.business_key = rng.choice(("b1", "b2")) + of_parent
        item.is_undone = rng.random() < 0.06
        if rng.random() < 0.4:
            ends = (
                ["raise"] if lane == "guarded" else [each for each in ENDS if each not in ALONE or lane not in TOGETHER]
            )
            item.script = [rng.choice(ends) for _ in range(rng.choice((1, 1, 2, 3)))]
            if rng.random() < 0.3:
                item.script = ["raise"] * 6
        if self._depth < 2 and rng.random() < 0.25:
            self._depth += 1
            item.sends = [self._item(item.number) for _ in range(rng.choice((1, 1, 2)))]
            self._depth -= 1
        return item
