"""The watch over messages whose outcome is waited for: one look for all of them, however many callers wait.

    wait() --> new --first look--> known --looks, further and further apart--> receipt
                  \\--nothing found--> UnknownMessage                timeout --> StillWaiting

Whoever waits for the answer to a request gets it when it is kept here. Its receipt is looked for as well: a request
that was dead-lettered has no answer.

The first look of an id reads the history of the days since the id was made. Each later one reads only what was written
since the first: see durable.storage.sql.receipts. The longer the youngest caller has waited, the rarer the looks; none
is taken while nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NamedTuple
from uuid import UUID

from durable.envelope import Envelope
from durable.errors import NoAnswer, StillWaiting, StorageUnavailable, UnknownMessage, again
from durable.messages.routing import LOCAL
from durable.requests.receipts import DONE, Receipt, is_waiting, receipt_of
from durable.settings import Settings
from durable.storage import answers
from durable.storage import receipts as storage
from durable.storage.database import Database
from durable.storage.receipts import Standing
from durable.tasks.waiting import is_set_within
from durable.telemetry import log

_SHORTEST: Final = 0.02  # seconds between two looks
_PART_OF_AGE: Final = 0.1
_MOST_IDS: Final = 1_000  # of one look
_ONE_LOOK: Final = timedelta(seconds=10)  # for a caller that does not wait


class Question(NamedTuple):
    """A message, everywhere or in the inbox of one endpoint alone; or the answer to it."""

    id: UUID
    at: str | None
    wants_answer: bool = False
    """True for the answer to it, which came to `at`, or anywhere."""

    def places(self, standings: Iterable[Standing]) -> list[Standing]:
        """Return those of the standings that are asked for."""
        if self.at is None or self.wants_answer:
            return list(standings)
        return [each for each in standings if each.side == "incoming" and each.address == self.at]


class _Caller(NamedTuple):
    answer: asyncio.Future[Receipt | Envelope]
    is_patient: bool
    """False for one that wants to be told what the first look finds."""


@dataclass
class _Watched:
    """A message and the callers that wait for it."""

    since: float
    callers: list[_Caller] = field(default_factory=list)
    horizon: int = 0
    before: list[Standing] = field(default_factory=list)
    """Places where it had ended when it was first looked for."""
    is_done: bool = False
    """True for a request that was handled or sent: only its answer is looked for."""


class Watch:
    """Waits for the outcomes of messages, in one event loop."""

    def __init__(self, database: Callable[[], Database], settings: Settings) -> None:
        self._database = database
        self._longest_pause = settings.poll_interval.total_seconds()
        self._clock_lead: timedelta = settings.clock_lead
        self._watched: dict[Question, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._new = asyncio.Event()
        self._trouble: StorageUnavailable | None = None
        self._is_open = True

    async def wait(self, message_id: UUID, patience: timedelta, *, at: str | None = None) -> Receipt:
        """Return the receipt of this message, as soon as it waits nowhere any more.

        A `patience` of 0 takes one look. `at`: tell only of the inbox of this endpoint, as if nothing else were known.
        Raises UnknownMessage, StillWaiting after `patience`, and StorageUnavailable when the database was away then.
        """
        receipt = await self._wait(Question(message_id, at), patience)
        assert isinstance(receipt, Receipt)
        return receipt

    async def answer(self, request_id: UUID, patience: timedelta, *, from_here: bool = False) -> Envelope:
        """Return the first answer to this request, as soon as it is kept; errors as in wait(), and NoAnswer.

        `from_here`: only an answer of this service itself, whatever others have sent.
        """
        question = Question(request_id, LOCAL if from_here else None, wants_answer=True)
        answer = await self._wait(question, patience)
        assert isinstance(answer, Envelope)
        return answer

    async def _wait(self, question: Question, patience: timedelta) -> Receipt | Envelope:
        if not self._is_open:
            raise _stopped(question.id)
        loop = asyncio.get_running_loop()
        caller = _Caller(loop.create_future(), is_patient=bool(patience))
        watched = self._watched.setdefault(question, _Watched(loop.time()))
        watched.since = loop.time()
        watched.callers.append(caller)
        if not caller.is_patient:
            watched.horizon = 0
            watched.before = []
            watched.is_done = False
        self._new.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="watch outcomes")
        limit = asyncio.timeout((patience or _ONE_LOOK).total_seconds())
        try:
            async with limit:
                return await caller.answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late(question.id, patience) from None
        finally:
            watched.callers.remove(caller)
            if not watched.callers and self._watched.get(question) is watched:
                del self._watched[question]

    def _late(self, message_id: UUID, patience: timedelta) -> StillWaiting | StorageUnavailable:
        if self._trouble is not None:
            return StorageUnavailable(f"message {message_id}: no outcome can be read now: {self._trouble}")
        if not patience:
            return StorageUnavailable(f"message {message_id}: no outcome could be read within {_ONE_LOOK}; ask again")
        return StillWaiting(
            f"message {message_id}: still waiting after {patience.total_seconds():g} s; wait again, within"
            " history_retention of the end of the message"
        )

    async def settle(self) -> None:
        """Return when no look is under way; other callers wait on, and looks go on for them."""
        if self._task is not None and not self._watched:
            self._new.set()
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """End the looks, for good; callers that still wait are told to ask again."""
        self._is_open = False
        for question, watched in self._watched.items():
            self._fail(watched.callers, _stopped(question.id))
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    # ------------------------------------------------------------------ looks

    async def _run(self) -> None:
        while self._watched:
            self._new.clear()
            try:
                await self._look()
                self._trouble = None
            except StorageUnavailable as error:
                self._trouble = error
                self._hasten(error)
                log.debug("outcomes cannot be looked up now: %s", error)
            except Exception as error:
                log.exception("outcomes cannot be looked up")
                self._fail([caller for watched in self._watched.values() for caller in watched.callers], error)
            await self._pause()

    async def _pause(self) -> None:
        """Wait for the next look: a tenth of the time that the youngest caller has waited, or until a new one comes."""
        if not self._watched:
            return
        youngest = max(each.since for each in self._watched.values())
        age = asyncio.get_running_loop().time() - youngest
        await asyncio.sleep(_SHORTEST)
        await is_set_within(self._new, min(self._longest_pause, age * _PART_OF_AGE))

    async def _look(self) -> None:
        await self._look_for_answers([each for each in self._watched if each.wants_answer])
        places = {each: watched for each, watched in self._watched.items() if not watched.is_done}
        new = [each for each, watched in places.items() if not watched.horizon][:_MOST_IDS]
        known = {each: watched.horizon for each, watched in places.items() if watched.horizon}
        if new:
            await self._look_first(new)
        questions = list(known)
        for start in range(0, len(questions), _MOST_IDS):
            await self._look_again(questions[start : start + _MOST_IDS], min(known.values()))

    async def _look_for_answers(self, questions: Sequence[Question]) -> None:
        for start in range(0, len(questions), _MOST_IDS):
            chunk = questions[start : start + _MOST_IDS]
            kept = await self._database().transaction(answers.read, {each.id for each in chunk})
            for request_id, endpoint, envelope in kept:
                for question in (Question(request_id, at, wants_answer=True) for at in (None, endpoint)):
                    if question in self._watched:
                        self._give(question, envelope or _forgotten(request_id))

    async def _look_first(self, questions: Sequence[Question]) -> None:
        ids = {each.id for each in questions}
        asking = {each: list(self._watched[each].callers) for each in questions}
        sighting = await self._database().transaction(
            storage.look, ids, ended_after=storage.made_after(ids, self._clock_lead)
        )
        found = _by_id(sighting.standings)
        for question in questions:
            watched = self._watched.get(question)
            if watched is None:
                continue  # its callers have left
            standings = question.places(found.get(question.id, []))
            if is_waiting(standings):
                watched.horizon = sighting.horizon
                watched.before = [standing for standing in standings if standing.outcome != storage.WAITING]
                self._hasten(_still_waiting(question.id), question)
            elif not self._settle(question, standings):
                self._fail(asking[question], _unknown(question.id))  # for others, that came since, it may be known now

    async def _look_again(self, questions: Sequence[Question], since: int) -> None:
        ids = {each.id for each in questions}
        before = {each: self._watched[each].before for each in questions if each in self._watched}
        found = _by_id(await self._database().transaction(storage.look_again, ids, since=since))
        for question in questions:
            watched = self._watched.get(question)
            if watched is None:
                continue
            standings = [*before.get(question, []), *question.places(found.get(question.id, []))]
            if not is_waiting(standings) and not self._settle(question, standings):
                watched.horizon = 0  # as after a restore, whose transactions have other numbers: look at everything

    def _settle(self, question: Question, standings: Sequence[Standing]) -> bool:
        receipt = receipt_of(standings)
        if receipt is None:
            return False
        if not question.wants_answer:
            self._give(question, receipt)
        elif receipt.outcome in DONE:
            self._watched[question].is_done = True
            self._hasten(_still_waiting(question.id), question)
        else:
            self._give(question, _unanswered(receipt))
        return True

    def _give(self, question: Question, found: Receipt | Envelope | NoAnswer) -> None:
        for caller in self._watched.pop(question).callers:
            if caller.answer.done():
                continue
            if isinstance(found, NoAnswer):
                caller.answer.set_exception(again(found))
            else:
                caller.answer.set_result(found)

    def _fail(self, callers: Iterable[_Caller], error: Exception) -> None:
        for caller in callers:
            if not caller.answer.done():
                caller.answer.set_exception(again(error))

    def _hasten(self, error: Exception, *questions: Question) -> None:
        """Give this error to the callers of these questions, or of all, that want the first look alone."""
        watched = [self._watched[each] for each in questions or self._watched]
        self._fail([caller for each in watched for caller in each.callers if not caller.is_patient], error)


def _by_id(standings: Iterable[Standing]) -> dict[UUID, list[Standing]]:
    found: dict[UUID, list[Standing]] = defaultdict(list)
    for each in standings:
        found[each.id].append(each)
    return dict(found)


def _still_waiting(message_id: UUID) -> StillWaiting:
    return StillWaiting(f"message {message_id}: still waiting; ask again")


def _stopped(message_id: UUID) -> StillWaiting:
    return StillWaiting(f"message {message_id}: still waiting when this bus was stopped; wait again where one runs")


def _unanswered(receipt: Receipt) -> NoAnswer:
    reason = f": {receipt.reason}" if receipt.reason else ""
    return NoAnswer(f"request {receipt.id}: {receipt.outcome}{reason}", may_come=receipt.outcome == "dead-lettered")


def _forgotten(request_id: UUID) -> NoAnswer:
    return NoAnswer(f"request {request_id}: the answer was forgotten")


def _unknown(message_id: UUID) -> UnknownMessage:
    return UnknownMessage(
        f"message {message_id}: unknown here; wait after the commit, within history_retention, in the service that sent"
        " or received the message"
    )
