"""The receiving end of RabbitMQ: the queues of an address, and what has arrived from them.

    queues --> arrived --> receive() --> COMMIT --> Basic.Ack, one for each
                  ^           |
                  +-----------+  Busy, Failed: kept, not acknowledged, offered again after a pause

    DOWN --declare, consume every queue--> UP --connection or channel lost, queue deleted--> DOWN, and soon again
                                          |  ^
                                          +--+  declare again every reconnect_pause_longest

Deliveries of all queues gather while a batch is being stored. A delivery is acknowledged, by its own tag, when its
envelope is stored and never before; a delivery that is no envelope is kept as a dead letter first. Deliveries without
an acknowledgement when their channel is lost are delivered again, here or elsewhere, and the receiver knows duplicates;
those of a deleted queue are not. Once the consumer of an ordered queue is lost, nothing of it is stored any more:
another listener may have what comes behind (durable.transports.rabbitmq.held).
The prefetch of each queue bounds the deliveries held. When they have more than buffer_bytes all the same, the channels
are closed, which puts the deliveries back in front, and opened again with a prefetch for the largest messages.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NoReturn

from durable.envelope import Envelope
from durable.errors import InvalidSetting, StorageUnavailable, TransportError
from durable.failpoints import failpoint
from durable.grammar import several
from durable.messages.scope import scoped
from durable.outcomes import Duplicate, Outcome, Rejected, Stored, all_settled
from durable.settings import Settings
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import Stuck, end, in_time, in_turn
from durable.tasks.waiting import is_set_within
from durable.telemetry import log
from durable.transports.base import Receiver
from durable.transports.gate import Gate
from durable.transports.rabbitmq.address import QueueAddress, Source, SubscriptionAddress, name_on_topic
from durable.transports.rabbitmq.arrivals import Origin, Unmappable
from durable.transports.rabbitmq.broker import CLOSING_SECONDS, Broker
from durable.transports.rabbitmq.consumers import Consumers, Delivery, acknowledge
from durable.transports.rabbitmq.declaring import declare
from durable.transports.rabbitmq.held import Held
from durable.transports.rabbitmq.signatures import Verifier
from durable.transports.rabbitmq.topology import Topology, listening

_LONGEST_GATHERING: Final = 0.02  # seconds


class RabbitListener:
    """A `durable.transports.base.Listener` for one `rabbitmq://` source."""

    def __init__(
        self,
        address: Source,
        endpoint: str,
        broker: Broker,
        settings: Settings,
        service: str,
        handled: Callable[[], Collection[str]],
    ) -> None:
        self._source = address
        self._endpoint = endpoint
        self._broker = broker
        self._settings = settings
        self._service = service
        self._handled = handled
        self._prefetch = address.options.prefetch or settings.prefetch
        self._counts: Counter[str] = Counter(connections=0, dropped=0, batches=0, envelopes=0, refused=0, down=0)
        self._is_serving = False
        self._cannot_store = ""
        self._consumers: Consumers | None = None
        self._held = Held()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._down_because = ""
        self._is_shared = False

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        return str(self._source)

    def statistics(self) -> Mapping[str, int]:
        """Return the counters since serve(): connections, dropped, batches, envelopes, refused; and `down`, 1 while it
        is.
        """
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        """Consume, now or, while the broker is away, as soon as it can be reached.

        Raises InvalidSetting when a queue is there with other arguments, if the broker can be asked now.
        """
        topology = listening(self._source, self._settings, service=self._service, handled=self._handled())
        self._held.is_ordered = any(queue.ordered for queue in topology.queues)
        self._is_shared = any(queue.declared and not queue.ordered for queue in topology.queues)
        await self._broker.consuming.__aenter__()
        try:
            await self._try_to_consume(topology)
        except BaseException:
            await self._broker.consuming.__aexit__()
            raise
        self._keeping = asyncio.create_task(self._keep_consuming(topology), name=f"consume {self.address}")
        self._storing = asyncio.create_task(self._store_arrivals(receiver), name=f"store from {self.address}")
        self._is_serving = True

    async def close(self) -> None:
        """Stop deliveries, wait at most `drain_timeout` for the batch under way, and close.

        The consumer of an ordered queue is not cancelled before: the broker would make another one active, which would
        be given what comes behind the deliveries that are held here. Its channel is closed instead, which puts them
        back in front, for the next one to begin with.

        Deliveries without an acknowledgement are then delivered again, to the other consumers of the queues.
        """
        if not self._is_serving:
            return
        self._is_serving = False
        try:
            self._stop.set()
            self._changed.set()
            await end([self._keeping], within=CLOSING_SECONDS)
            if self._consumers is not None and not self._held.is_ordered:
                await in_time(self._consumers.cancel(), CLOSING_SECONDS)
            await asyncio.wait({self._storing}, timeout=self._settings.drain_timeout.total_seconds())
        finally:
            left: Sequence[asyncio.Task[Any]] = [self._keeping, self._storing]
            try:
                left = await end(left, within=CLOSING_SECONDS)
            finally:
                leaving = self._leave(self._consumers, is_certain=not left)
                await in_turn(leaving, self._broker.consuming.__aexit__())
        if left:
            raise Stuck(f"{self.address}: {left[0].get_name()} did not end when cancelled", left)

    async def _leave(self, consumers: Consumers | None, *, is_certain: bool) -> None:
        """Hold no delivery any more: other consumers of the queue would wait for it as long as the connection lives."""
        if consumers is not None:
            is_certain = await consumers.close() and is_certain
        if not is_certain:
            log.warning("listener %s cuts its connection off, so that other listeners get its deliveries", self.address)
            self._broker.consuming.drop()

    # ------------------------------------------------------------------ up and down

    async def _keep_consuming(self, topology: Topology) -> NoReturn:
        """Consume again after each loss.

        A deleted queue is declared and bound at once: while its exchange has other queues, the broker confirms the
        messages that this one misses. An ordered one is consumed later: its active consumer may hear of the deletion
        last, a second later or more, and stores what it holds until then.
        """
        first, longest = self._settings.reconnect_pause, self._settings.reconnect_pause_longest
        pause = first
        while True:
            try:
                if self._consumers is not None:
                    lost = self._consumers
                    await self._declare_until_lost(lost, topology)
                    await self._lose(lost)
                    pause = longest if lost.is_cancelled and self._held.is_ordered else first
                    if lost.is_cancelled:
                        await self._try_to_declare(topology)
                await asyncio.sleep(pause.total_seconds() * random.uniform(0.5, 1.5))
                pause = min(longest, pause * 2)
                await self._try_to_consume(topology)
            except BaseException as error:  # the loop's top: it ends when it is cancelled, and never else
                raise_if_cancelled(error)
                if not isinstance(error, InvalidSetting):
                    log.exception("internal error while consuming %s; will retry", self.address)
                self._go_down(error)

    async def _try_to_consume(self, topology: Topology) -> None:
        """Start to listen. Raises InvalidSetting; a broker that cannot be reached only leaves the listener down."""
        consumers = Consumers(
            self._arrive,
            Verifier(self._settings, takes_unsigned=self._source.options.unsigned == "yes"),
            limit_bytes=self._settings.max_message_bytes,
            seconds=self._settings.connect_timeout.total_seconds(),
        )
        try:
            await self._declare(topology)
            for queue in topology.queues:
                await consumers.add(self._broker.consuming, self._origin(queue.name), self._prefetch)
        except TransportError as error:
            await self._leave(consumers, is_certain=True)
            self._go_down(error)
        except BaseException:
            await self._leave(consumers, is_certain=True)
            raise
        else:
            self._consumers = consumers
            self._counts["connections"] += 1
            self._go_up()
            self._bound_bytes()

    async def _declare(self, topology: Topology) -> None:
        connection = await self._broker.consuming.get()
        await declare(connection, topology, seconds=self._settings.connect_timeout.total_seconds())

    async def _declare_until_lost(self, consumers: Consumers, topology: Topology) -> None:
        """Declare again and again, until the consumers are lost: an exchange or a binding may be deleted, too, which
        cancels no consumer. A refusal leaves the consumers at work on what the queues have.
        """
        pause = self._settings.reconnect_pause_longest.total_seconds()
        while not (await asyncio.wait({consumers.lost}, timeout=pause))[0]:
            if await self._try_to_declare(topology):
                self._go_up()

    async def _try_to_declare(self, topology: Topology) -> bool:
        """Declare, and return whether the broker has answered. A refusal takes the listener down."""
        try:
            await self._declare(topology)
        except InvalidSetting as error:
            self._go_down(error)
            return False
        except TransportError as error:  # the connection is lost, which the consumers tell, or is soon asked again
            log.debug("listener %s cannot declare now: %s", self.address, error)
            return False
        return True

    async def _lose(self, consumers: Consumers) -> None:
        """Leave the consumers that are lost."""
        self._go_down(consumers.lost.result())
        try:
            await self._leave(consumers, is_certain=True)
        finally:
            self._consumers = None
            self._drop_lost()

    def _go_up(self) -> None:
        self._counts["down"] = 0
        if self._down_because:
            log.warning("listener %s is up again", self.address)
            self._down_because = ""

    def _go_down(self, reason: BaseException) -> None:
        self._counts["dropped"] += 1
        self._counts["down"] = 1
        if str(reason) != self._down_because:  # once, not at every attempt
            self._down_because = str(reason)
            level = logging.ERROR if isinstance(reason, InvalidSetting) else logging.WARNING
            log.log(level, "%s is down: %s", self.address, reason)

    def _origin(self, queue: str) -> Origin:
        """A queue of the topic exchange gets one type only, which its name ends with."""
        address = str(QueueAddress(self._source.broker, queue))
        match self._source:
            case QueueAddress(message_type=message_type):
                return Origin(queue, address, message_type)
            case SubscriptionAddress():
                message_type = queue.removeprefix(name_on_topic(self._service, ""))
                return Origin(queue, address, message_type, is_of_topic=True)

    # ------------------------------------------------------------------ what arrives

    def _arrive(self, delivery: Delivery) -> None:
        self._held.add(delivery)
        self._changed.set()
        self._bound_bytes()

    def _bound_bytes(self) -> None:
        """Begin again with a prefetch for the largest messages, unless the address or the settings give one."""
        if self._held.bytes <= self._settings.buffer_bytes or self._consumers is None:
            return
        fewer = self._source.options.prefetch or self._settings.prefetch_of_large
        if fewer < self._prefetch:
            self._prefetch = fewer
            self._consumers.give_up(f"more than buffer_bytes are held; consuming again, {fewer} at a time")

    async def _store_arrivals(self, receiver: Receiver) -> None:
        first, longest = self._settings.busy_pause, self._settings.busy_pause_longest
        pause = first
        while not self._stop.is_set():
            self._changed.clear()
            if not self._held:
                await self._changed.wait()
                continue
            batch = self._take(receiver.credit())
            began = time.monotonic()
            kept = await self._store_or_keep(receiver, batch)
            if len(kept) < len(batch):
                pause = first
            if kept or not batch:
                await is_set_within(self._stop, pause.total_seconds())
                pause = min(longest, pause * 2)
            else:
                await self._gather(len(batch) + len(self._held), time.monotonic() - began)

    async def _gather(self, held: int, took: float) -> None:
        """Wait for what the broker sends in place of what was acknowledged, where a small prefetch was used up.

        Otherwise half of it would be stored while the other half is on its way, in twice as many commits. So the wait
        is no longer than one of these takes.
        """
        if not held >= self._prefetch <= self._settings.batch_size:
            return
        latest = time.monotonic() + min(took, _LONGEST_GATHERING)
        while len(self._held) < self._prefetch and not self._stop.is_set():
            self._changed.clear()
            if not await is_set_within(self._changed, latest - time.monotonic()):
                return

    async def _store_or_keep(self, receiver: Receiver, batch: Sequence[Delivery]) -> Sequence[Delivery]:
        """Store the batch. Deliveries that could not be stored wait at the head of the others, and are returned."""
        try:
            await self._store_unless_lost(receiver, batch)
            self._cannot_store = ""
        except BaseException as error:  # the loop's top: a fault of ours, perhaps in the receiver; nothing is lost
            raise_if_cancelled(error)
            self._tell_cannot_store(error, len(batch))
        kept = [delivery for delivery in batch if not delivery.settled]
        self._held.put_back(kept)
        return kept

    async def _store_unless_lost(self, receiver: Receiver, batch: Sequence[Delivery]) -> None:
        """Store the batch. One of an ordered queue is withdrawn as soon as its consumer is lost: the receiver does not
        begin to store it any more.
        """
        if not batch or not self._held.is_ordered:
            await self._store(receiver, batch)
            return
        lost, unless_lost = batch[0].consumer.lost, asyncio.timeout(None)
        is_storing = True

        def withdraw(_: object) -> None:
            if is_storing:  # a callback that is removed comes all the same when its future is done already
                unless_lost.reschedule(0)

        try:
            async with unless_lost:
                lost.add_done_callback(withdraw)
                try:
                    await self._store(receiver, batch)
                finally:
                    is_storing = False
                    lost.remove_done_callback(withdraw)
        except TimeoutError:
            if not unless_lost.expired():
                raise

    def _tell_cannot_store(self, error: BaseException, count: int) -> None:
        """Once for each outage: the same deliveries are tried again and again."""
        is_new, self._cannot_store = str(error) != self._cannot_store, str(error)
        if not isinstance(error, StorageUnavailable):
            log.error(
                "listener %s cannot store %s: %r",
                self.address,
                several(count, "deliveries"),
                error,
                exc_info=error if is_new else None,
            )
        elif is_new:
            log.warning("listener %s keeps deliveries that cannot be rejected now: %s", self.address, error)

    def _take(self, credit: int) -> list[Delivery]:
        """Take deliveries: as many as the receiver has room for, up to the window of a sending agent."""
        if self._held.is_ordered:
            self._drop_lost()
        windows = self._settings.batches_in_flight
        most = min(credit, self._settings.batch_size * windows)
        return self._held.take(most, self._settings.batch_bytes * windows)

    def _drop_lost(self) -> None:
        if dropped := self._held.drop_lost():
            log.warning(
                "listener %s has dropped %s that it had not stored: the broker cancelled the consumer, and another "
                "listener may have stored what came behind them; those of a deleted queue are lost",
                self.address,
                several(len(dropped), "deliveries"),
            )

    async def _store(self, receiver: Receiver, batch: Sequence[Delivery]) -> None:
        """Store the valid deliveries, keep the others as dead letters, and acknowledge both."""
        envelopes = [delivery.content for delivery in batch if isinstance(delivery.content, Envelope)]
        if self._is_shared and any(envelope.partition_key for envelope in envelopes):
            self._is_shared = False  # said once
            log.warning(
                "listener %s: messages with a key arrive over a queue that is not ordered, "
                "and two listeners may store them in "
                "another order; write ordered=yes in its address",
                self.address,
            )
        unmappable = {
            position: Rejected(delivery.content.reason)
            for position, delivery in enumerate(batch)
            if isinstance(delivery.content, Unmappable)
        }
        received = await self._receive(receiver, batch)
        if received:
            failpoint("C10")
        outcomes = unmappable | received
        await self._acknowledge(
            [each for place, each in enumerate(batch) if isinstance(outcomes.get(place), Stored | Duplicate)]
        )
        for place, delivery in enumerate(batch):
            if isinstance(outcome := outcomes.get(place), Rejected):
                address = scoped(self._endpoint, delivery.peer)
                await receiver.reject(address, delivery.raw, outcome.reason, delivery.metadata)
                self._counts["refused"] += 1
                await self._acknowledge([delivery])

    async def _receive(self, receiver: Receiver, batch: Sequence[Delivery]) -> dict[int, Outcome]:
        """Store the envelopes, those of each peer together; return the outcomes by their places in the batch.

        In an ordered queue only neighbours are stored together, and nothing behind one that stays: it has no outcome.
        """
        gate = Gate(receiver, self._endpoint, self._service, self._settings)
        arrived = [
            (place, each.peer, each.content) for place, each in enumerate(batch) if isinstance(each.content, Envelope)
        ]
        if not self._held.is_ordered:
            arrived.sort(key=lambda each: each[1] or "")
        received: dict[int, Outcome] = {}
        for peer, run in groupby(arrived, key=lambda each: each[1]):
            places, _, envelopes = zip(*run, strict=True)
            outcomes = await gate.receive(envelopes, peer)
            received |= zip(places, outcomes, strict=True)
            if self._held.is_ordered and not all_settled(outcomes):
                break
        return received

    async def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            await acknowledge(deliveries)
            self._counts["batches"] += 1
            self._counts["envelopes"] += len(deliveries)
