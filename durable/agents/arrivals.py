"""Storage of arrivals: one statement for a round of batches, another for what was known, an outcome for each envelope.

What cannot be stored as an envelope is quarantined as a dead letter, with its bytes, and spoils nothing else. A row is
owned by this node when its handler has room, and by any node otherwise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.agents.intake import Intake
from durable.encryption.repeats import arrival_digest, is_another, known_arrival
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope
from durable.errors import InvalidMessage, StorageUnavailable
from durable.messages import validation as screening
from durable.messages.ordering import OrderingRules
from durable.messages.repeats import outlives
from durable.messages.scope import listener_of
from durable.outcomes import DUPLICATE, LONGEST_REASON, OTHER_BODY, STORED, Outcome, Rejected
from durable.storage import inbox
from durable.storage.inbox import Arrival, Key, Unfit
from durable.storage.isolation import RefusedPerhaps
from durable.telemetry import Event, Subject, log

_OTHER_BODY = "another message was received under the same id before"


class _Found(NamedTuple):
    """Result of storing: new envelopes, envelopes that differ from the one known under their id, and outcomes of those
    that the database refuses.
    """

    fresh: set[Key]
    changed: set[Key]
    refused: Mapping[Key, Outcome]


_NOTHING: Final = _Found(set(), set(), {})
_Arrived = tuple[str, Envelope]
"""An envelope behind its endpoint."""


class ArrivalStore:
    """Stores what has arrived at this node."""

    def __init__(
        self,
        context: AgentContext,
        intake: Intake,
        places: OrderingRules | None,
        on_key_stored: Callable[[str], None],
    ) -> None:
        self._places = places or OrderingRules()
        self._on_key_stored = on_key_stored
        self._database = context.database
        self._node = context.node
        self._settings = context.settings
        self._limits = context.settings.limits
        self._clock = context.clock
        self._counters = context.counters
        self._ring = context.ring
        self._intake = intake

    async def store(self, envelopes: Sequence[_Arrived]) -> list[Outcome]:
        """Store envelopes, each for its endpoint; return the outcomes in order."""
        fit: dict[Key, _Arrived] = {}
        unfit: dict[int, Outcome] = {}
        for position, (endpoint, envelope) in enumerate(envelopes):
            reason = self._unacceptable(envelope)
            if reason is None:
                envelope = self._ring.arrived(envelope)
                key = (envelope.id, endpoint)
                reason = self._add(fit, key, envelope)
            if reason is not None:
                kept = await self._quarantine_alone(endpoint, envelope, reason)
                unfit[position] = OTHER_BODY if reason == _OTHER_BODY and kept == STORED else kept
        fresh, changed, refused = await self._store_fit(list(fit.values())) if fit else _NOTHING
        outcomes: list[Outcome] = []
        for position, (endpoint, envelope) in enumerate(envelopes):
            key = (envelope.id, endpoint)
            if position in unfit:
                outcomes.append(unfit[position])
            elif key in refused:
                outcomes.append(refused[key])
            elif key in fresh:
                outcomes.append(STORED)
            else:
                outcomes.append(OTHER_BODY if key in changed else DUPLICATE)
            fresh.discard(key)  # the same id again in this round is a duplicate
        return outcomes

    def _add(self, fit: dict[Key, _Arrived], key: Key, envelope: Envelope) -> str | None:
        """Add an envelope to those of a round; of two with one id the first, which lives as long as both. Returns the
        reason why it is another message than the first.
        """
        if key not in fit:
            fit[key] = key[1], envelope
            return None
        now, first = self._clock.now(), fit[key][1]
        known = known_arrival(self._ring, first, now)
        if is_another(self._ring, known, envelope, now):
            return _OTHER_BODY
        if outlives(known, envelope):
            fit[key] = key[1], msgspec.structs.replace(first, deliver_by=envelope.deliver_by)
        return None

    async def quarantine(self, unfit: Unfit) -> None:
        """Keep bytes that are no envelope as a dead letter."""
        await self._database.transaction(inbox.quarantine, self._node, unfit)
        self._tell_quarantined(unfit)

    async def _store_fit(self, envelopes: Sequence[_Arrived]) -> _Found:
        """Store envelopes that seem sound, and compare those that were known with what is known of them. One that the
        database refuses becomes a dead letter, and the others proceed.
        """
        fresh, errors = await _one_by_one(self._store_together, envelopes)
        known = [each for each in envelopes if _key(each) not in fresh and _key(each) not in errors]
        changed, unsaid = await _one_by_one(self._compare_together, known) if known else (set[Key](), {})
        errors |= unsaid
        if await self._is_the_wiring(errors, len(envelopes)):
            raise next(iter(errors.values()))
        refused = {
            _key(each): await self._quarantine_alone(*each, str(errors[_key(each)]))
            for each in envelopes
            if _key(each) in errors
        }
        return _Found(fresh, changed, refused)

    async def _is_the_wiring(self, errors: Mapping[Key, InvalidMessage], count: int) -> bool:
        """Tell whether the cause lies outside the envelopes: all are refused alike, or none can be stored at all."""
        if len(errors) < count or not all(isinstance(error, RefusedPerhaps) for error in errors.values()):
            return False
        if count > 1:
            return len({error.code for error in errors.values() if isinstance(error, RefusedPerhaps)}) == 1
        try:
            await self._database.statement(inbox.store, [])
        except InvalidMessage:
            return True
        return False

    async def _store_together(self, envelopes: Sequence[_Arrived]) -> set[Key]:
        """Store them, and give the new ones to their handlers. Returns the keys of these."""
        now = self._clock.now()
        arrivals = [self._arrival(endpoint, envelope, now) for endpoint, envelope in envelopes]
        fresh = set[Key]()
        try:
            fresh = await self._database.statement(inbox.store, arrivals)
        finally:
            self._give_back(arrivals, fresh)
        mine = [
            LeasedEnvelope(arrival.envelope, endpoint=arrival.endpoint)
            for arrival in arrivals
            if arrival.owner == self._node != ANY_NODE and arrival.key in fresh
        ]
        if mine:
            self._intake.accept(mine)
        for arrival in arrivals:
            if arrival.place.ordering_key is not None:
                self._on_key_stored(arrival.place.ordering_key)
        return fresh

    async def _compare_together(self, envelopes: Sequence[_Arrived]) -> set[Key]:
        """Compare duplicates with what is known under their ids. Returns the keys of those that are other messages,
        which become dead letters.
        """
        duplicates = [Arrival(endpoint, envelope, ANY_NODE) for endpoint, envelope in envelopes]
        changed = await self._database.transaction(self._compare, duplicates)
        for arrival in changed:
            self._tell_quarantined(_unfit(arrival))
        return {arrival.key for arrival in changed}

    def _arrival(self, endpoint: str, envelope: Envelope, now: datetime) -> Arrival:
        """Choose the owner of each row. Rows that wait until they are due, or for their turn, have no owner; rows that
        have come too late expire.
        """
        place = self._places.incoming(envelope)
        waits = envelope.execution_time is not None or place.ordering_key is not None or envelope.is_late(now)
        owner = ANY_NODE if waits else self._intake.reserve(envelope)
        return Arrival(endpoint, envelope, owner, place, arrival_digest(self._ring, envelope))

    def _give_back(self, arrivals: Sequence[Arrival], fresh: set[Key]) -> None:
        """The room of those that are not this node's work now."""
        idle = [a.envelope for a in arrivals if a.owner == self._node != ANY_NODE and a.key not in fresh]
        if idle:
            self._intake.abandon(idle)

    # ------------------------------------------------------------------ inside the transaction

    def _compare(self, conn: Connection, schema: str, duplicates: Sequence[Arrival]) -> Sequence[Arrival]:
        """Quarantine those that are no duplicates of the messages known under their ids, and return them. What waits
        lives as long as its duplicates.
        """
        known = inbox.find_known(conn, schema, duplicates)
        compared = [(arrival, *known[arrival.key]) for arrival in duplicates if arrival.key in known]
        changed = [each for each, first, now in compared if is_another(self._ring, first, each.envelope, now)]
        others = {arrival.key for arrival in changed}
        longer = [each for each, first, _ in compared if each.key not in others and outlives(first, each.envelope)]
        if longer and not inbox.live_longer(conn, schema, longer):
            raise StorageUnavailable("duplicate of a message that ends at this moment; send it again")
        for arrival in changed:
            inbox.quarantine(conn, schema, self._node, _unfit(arrival))
        return changed

    async def _quarantine_alone(self, endpoint: str, envelope: Envelope, reason: str) -> Outcome:
        """Stored, as a dead letter; Rejected when the database refuses even that: then its sender keeps it as one."""
        unfit = Unfit(endpoint, _raw(envelope), reason, _known(envelope))
        kept = [unfit]
        if reason != _OTHER_BODY and screening.is_whole(envelope, **self._limits):
            place = self._places.incoming(envelope)
            kept.insert(0, unfit._replace(headers=envelope.headers, replayable=True, place=place))
        errors: list[InvalidMessage] = []
        for each in kept:
            try:
                await self.quarantine(each)
            except RefusedPerhaps:  # rather than of this message it may tell of the table of dead letters
                raise
            except InvalidMessage as error:  # its headers, say, are what the database cannot store
                errors.append(error)
            else:
                return STORED
        log.error("cannot quarantine %s at %s, rejected: %s", envelope.id, endpoint, errors[-1])
        return Rejected(f"{reason}; as a dead letter: {errors[-1]}"[:LONGEST_REASON])

    def _tell_quarantined(self, unfit: Unfit) -> None:
        """Log and count it: after the COMMIT, because a transaction may run more than once."""
        envelope_id = unfit.envelope.id if unfit.envelope else "no id"
        log.error("quarantined at %s: %s: %s", unfit.endpoint, envelope_id, unfit.reason)
        self._counters.of(Subject.ENDPOINT, listener_of(unfit.endpoint)).add(Event.QUARANTINED)

    def _unacceptable(self, envelope: Envelope) -> str | None:
        reason = screening.find_error(envelope, **self._limits) or screening.find_misplaced(envelope)
        return reason or screening.find_misdating(envelope, self._clock.now(), **self._settings.window)


async def _one_by_one(
    work: Callable[[Sequence[_Arrived]], Awaitable[set[Key]]], envelopes: Sequence[_Arrived]
) -> tuple[set[Key], dict[Key, InvalidMessage]]:
    """Do _in_parts(), and once more for those that were refused perhaps because of the wiring: a right, say, may have
    come back in the midst of it. Raises RefusedPerhaps when work for no envelopes is refused, too.
    """
    done, errors = await _in_parts(work, envelopes)
    doubtful = [each for each in envelopes if isinstance(errors.get(_key(each)), RefusedPerhaps)]
    if not doubtful:
        return done, errors
    await work(())
    again, refused = await _in_parts(work, doubtful)
    certain = {key: error for key, error in errors.items() if not isinstance(error, RefusedPerhaps)}
    return done | again, certain | refused


async def _in_parts(
    work: Callable[[Sequence[_Arrived]], Awaitable[set[Key]]], envelopes: Sequence[_Arrived]
) -> tuple[set[Key], dict[Key, InvalidMessage]]:
    """Do the work for all of them; where the database refuses it, for each half. Returns the keys that the work has
    returned, and the refusal of each envelope that is refused alone.
    """
    try:
        return await work(envelopes), {}
    except InvalidMessage as error:
        if len(envelopes) == 1:
            return set(), {_key(envelopes[0]): error}
    middle = len(envelopes) // 2
    first, refused_first = await _in_parts(work, envelopes[:middle])
    second, refused_second = await _in_parts(work, envelopes[middle:])
    return first | second, refused_first | refused_second


def _key(arrived: _Arrived) -> Key:
    endpoint, envelope = arrived
    return envelope.id, endpoint


def _unfit(arrival: Arrival) -> Unfit:
    """A message whose id is that of another one."""
    return Unfit(arrival.endpoint, _raw(arrival.envelope), _OTHER_BODY, _known(arrival.envelope))


def _columns_are_sound(envelope: Envelope) -> bool:
    bare = msgspec.structs.replace(envelope, headers={}, body=b"", partition_key=None, deliver_by=None)
    return screening.find_error(bare, max_message_bytes=0) is None


def _known(envelope: Envelope) -> Envelope | None:
    """Return the fields of an unreadable envelope that can be stored with its bytes."""
    return envelope if _columns_are_sound(envelope) else None


def _raw(envelope: Envelope) -> bytes:
    """The body when the envelope around it is sound; otherwise the whole envelope."""
    if _columns_are_sound(envelope):
        return envelope.body
    try:
        return msgspec.msgpack.encode(envelope)
    except (TypeError, ValueError, OverflowError):  # such as a lone surrogate
        return repr(envelope).encode(errors="backslashreplace")
