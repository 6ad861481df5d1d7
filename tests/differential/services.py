"""The two services of a workload: their handlers do what each message says, and take notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, Context, PutBack, Reject, Release, Retry, RetryLater
from durable.envelope import DUE
from durable.outbox.outbox import Outbox
from tests.differential.messages import (
    CLASSES,
    Aged,
    Answer,
    Auto,
    Event,
    Fair,
    Grouped,
    Guarded,
    Guided,
    Listed,
    Parked,
    Plain,
    Question,
    Secret,
    Strict,
    Sync,
    Unrouted,
    Whole,
    Work,
)
from tests.differential.workload import Item, Where

SHOP, BILLING = "shop", "billing"
SERVICES: Final[Mapping[Where, str]] = {"here": SHOP, "there": BILLING}
EFFECT: Final = text("INSERT INTO effects (number, attempt) VALUES (:number, :attempt)")
YEARLY: Final = 900
"""Number of the message that the schedule brings."""
_RETRY: Final = Retry(immediate=1, delays=[100, 300], jitter=0)


class Panic(BaseException):
    """An end of a handler that is no Exception."""


class Notes:
    """The notes of a run, by both services: ids of messages, entries of handlers, and messages that are mended."""

    def __init__(self) -> None:
        self.names: dict[UUID, str] = {}
        self.ids: dict[str, set[UUID]] = defaultdict(set)
        self.sent: dict[int, UUID] = {}
        self.entries: list[tuple[Any, ...]] = []
        self.mended: set[int] = set()
        self._released: set[tuple[str, int]] = set()

    def name(self, message_id: UUID, item: Item) -> None:
        """Remember the id of a message by its number, or its business key."""
        name = f"#{item.number}" if item.business_key is None else f"{item.lane} {item.business_key}"
        self.names.setdefault(message_id, name)
        self.ids[name].add(message_id)
        self.sent[item.number] = message_id

    def named(self, message_id: UUID | None) -> str | None:
        return None if message_id is None else self.names.get(message_id, "?")

    def entered(self, service: str, work: Work, ctx: Context) -> None:
        headers = {name: "-" if name == DUE else value for name, value in ctx.headers.items()}
        about = (ctx.message_type, ctx.source, self.named(ctx.correlation_id), self.named(ctx.causation_id))
        when = (ctx.deliver_by is not None, sorted(headers.items()))
        self.entries.append((service, work.number, ctx.attempt, self.named(ctx.id), *about, *when))

    def end(self, service: str, work: Work, attempt: int) -> str:
        """Tell how this attempt ends."""
        if work.number in self.mended or attempt > len(work.script):
            return "ok"
        return work.script[attempt - 1]

    def may_release(self, service: str, number: int) -> bool:
        """Tell whether the message was not released before."""
        if (service, number) in self._released:
            return False
        self._released.add((service, number))
        return True


class Service:
    """A bus with a handler for each lane. `peer` is the address of the other, `own` its own."""

    def __init__(self, bus: Bus, notes: Notes, *, own: str, peer: str, are_sync: bool = False) -> None:
        self.bus = bus
        self.notes = notes
        self._peer = peer
        self._are_sync = are_sync
        bus.listen(own)
        bus.expects(Answer, at=own)
        bus.subscribe(Event, to=peer)
        for cls in (Plain, Event, Question, Secret, Aged):
            self._declare(cls)
        self._declare(Parked, on_dead_letter="park")
        self._declare(Grouped, max_batch=4)
        self._declare(Auto, max_batch="auto")
        self._declare(Whole, ordered=True)
        self._declare(Fair, fair_by="tenant", weights={"gold": 2})
        self._declare(Strict, retry=Retry.never(), on_expiry="dead-letter", inherit_deliver_by=True)
        patient = Retry(immediate=0, delays=[100], jitter=0)
        self._declare(Guided, on_error={LookupError: patient, OSError: Retry.never()})
        self._declare(Guarded)
        self._declare_sync(Sync)
        self._declare_listed()
        bus.every("0 0 1 1 *", Plain(YEARLY), name="yearly")

    # ------------------------------------------------------------------ sending

    def send(self, outbox: Outbox | Bus, item: Item) -> UUID:
        """Send a message with this unit of work, as it says."""
        message = CLASSES[item.lane](item.number, item.script, item.sends)
        options = options_of(item)
        to = self._peer if item.to == "there" else None
        if item.lane == "event":
            message_id = outbox.publish(message, **options)
        elif item.lane == "question":
            message_id = outbox.request(message, Answer, to=to, **options)
        else:
            message_id = outbox.send(message, to=to, **options)
        self.notes.name(message_id, item)
        return message_id

    # ------------------------------------------------------------------ handling

    def _declare(self, cls: type[Work], **options: Any) -> None:
        if self._are_sync:
            self._declare_sync(cls, **options)
            return

        async def handle(work: Any, session: AsyncSession, ctx: Context) -> object:
            self.notes.entered(self.bus.service, work, ctx)
            await session.execute(EFFECT, {"number": work.number, "attempt": ctx.attempt})
            for each in work.sends:
                if not each.is_undone:
                    self.send(self.bus, each)
                    continue
                savepoint = await session.begin_nested()
                self.send(self.bus, each)
                await savepoint.rollback()
            end = self.notes.end(self.bus.service, work, ctx.attempt)
            match end:
                case "rollback":
                    await session.rollback()
                case "commit":
                    await session.commit()
                case "close":
                    await session.close()
                case _:
                    pass
            return self._end(end, work, ctx)

        handle.__annotations__["work"] = cls
        self.bus.handles(cls, **{"retry": _RETRY, **options})(handle)

    def _declare_sync(self, cls: type[Work], **options: Any) -> None:
        def handle(work: Any, session: Session, ctx: Context) -> object:
            self.notes.entered(self.bus.service, work, ctx)
            session.execute(EFFECT, {"number": work.number, "attempt": ctx.attempt})
            for each in work.sends:
                if not each.is_undone:
                    self.send(self.bus, each)
                    continue
                savepoint = session.begin_nested()
                self.send(self.bus, each)
                savepoint.rollback()
            end = self.notes.end(self.bus.service, work, ctx.attempt)
            match end:
                case "rollback":
                    session.rollback()
                case "commit":
                    session.commit()
                case "close":
                    session.close()
                case _:
                    pass
            return self._end(end, work, ctx)

        handle.__annotations__["work"] = cls
        self.bus.handles(cls, **{"retry": _RETRY, **options})(handle)

    def _declare_listed(self) -> None:
        @self.bus.handles(Listed, max_batch=4, retry=_RETRY)
        async def handle(several: list[Listed], session: AsyncSession) -> None:
            for work in several:
                await session.execute(EFFECT, {"number": work.number, "attempt": 0})
                for each in work.sends:
                    self.send(self.bus, each)
            for work in several:
                if work.script and work.number not in self.notes.mended:
                    raise LookupError(work.script[0])

    def _end(self, end: str, work: Work, ctx: Context) -> object:
        """End an attempt: succeed, raise, or make a mistake."""
        match end:
            case "raise":
                raise ZeroDivisionError(f"attempt {ctx.attempt}")
            case "lookup":
                raise KeyError("no such row")
            case "os":
                raise FileNotFoundError(2, "no such file", "/nowhere")
            case "reject":
                raise Reject("no such customer")
            case "later":
                raise RetryLater(100)
            case "put back":
                raise PutBack(headers={"lane": "slow"})
            case "release":
                if self.notes.may_release(self.bus.service, work.number):
                    raise Release
            case "panic":
                raise Panic("no way out")
            case "unrouted":
                ctx.send(Unrouted())
            case "refused":
                ctx.send(Plain(0), key="")
            case "close":
                ctx.send(Plain(0))
            case "returns":
                return [Plain(-1), None, Event(-2)]
            case "no message":
                return 3
            case "no reply":
                ctx.reply(Answer(0))
            case _:
                pass
        if isinstance(work, Question):
            ctx.reply(Answer(work.number))
        return None


def options_of(item: Item) -> Any:
    given = {
        "key": item.key,
        "tenant": item.tenant,
        "delay": item.delay,
        "deliver_by": item.deliver_by,
        "id_from": item.business_key,
    }
    return {name: value for name, value in given.items() if value is not None}
