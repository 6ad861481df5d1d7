"""The receiving end of RabbitMQ: the queues of an address, and what has arrived from them.

    queues --> arrived --> receive() --> COMMIT --> Basic.Ack, one for each
                  ^           |
                  +-----------+  Busy, Failed: kept, not acknowledged, offered again after a pause

    DOWN --declare, consume every queue--> UP --connection or channel lost, queue deleted--> DOWN, and soon again

Deliveries of all queues gather while a batch is being stored. What was stored is acknowledged, each by its own tag and
never before; what can be no envelope is kept as a dead letter first. What is not acknowledged when its channel is lost
is delivered again, here or elsewhere, and the receiver knows duplicates. What is held is bounded by the prefetch of
each queue; nothing is sent back to the broker while the listener is up.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NoReturn

from durable.envelope import Envelope
from durable.errors import InvalidSetting, StorageUnavailable, TransportError
from durable.failpoints import failpoint
from durable.outcomes import Duplicate, Outcome, Rejected, Stored, merged
from durable.settings import Settings
from durable.telemetry import log
from durable.transports.base import Receiver
from durable.transports.rabbitmq_address import QueueAddress, Source, SubscriptionAddress
from durable.transports.rabbitmq_arrivals import Origin, Unmappable
from durable.transports.rabbitmq_broker import Broker
from durable.transports.rabbitmq_consumers import Consumers, Delivery, acknowledge
from durable.transports.rabbitmq_declaring import declare
from durable.transports.rabbitmq_topology import Topology, listening

_FIRST_PAUSE: Final = 0.02  # seconds before what could not be stored is offered again
_LONGEST_PAUSE: Final = 1.0
_FIRST_RECONNECT: Final = 0.2  # seconds before a lost connection is opened again, on average
_LONGEST_RECONNECT: Final = 5.0


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
        self._prefetch = address.options.prefetch or settings.amqp_prefetch
        self._counts: Counter[str] = Counter(connections=0, dropped=0, batches=0, envelopes=0, refused=0, down=0)
        self._tasks: asyncio.TaskGroup | None = None
        self._consumers: Consumers | None = None
        self._arrived: deque[Delivery] = deque()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._down_because = ""
        self._is_ordered = False
        self._is_shared = False

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        return str(self._source)

    def statistics(self) -> Mapping[str, int]:
        """Counters since serve(): connections, dropped, batches, envelopes, refused; and `down`, 1 while it is."""
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        """Consume, now or, while the broker is away, as soon as it can be reached.

        Raises InvalidSetting when a queue is there with other arguments, if the broker can be asked now.
        """
        topology = listening(self._source, self._settings, service=self._service, handled=self._handled())
        self._is_ordered = any(queue.ordered for queue in topology.queues)
        self._is_shared = any(queue.declared and not queue.ordered for queue in topology.queues)
        await self._broker.consuming.__aenter__()
        try:
            await self._try_to_consume(topology)
        except BaseException:
            await self._broker.consuming.__aexit__()
            raise
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._keeping = self._tasks.create_task(self._keep_consuming(topology), name=f"consume {self.address}")
        self._storing = self._tasks.create_task(self._store_arrivals(receiver), name=f"store from {self.address}")

    async def close(self) -> None:
        """Have nothing more delivered, wait at most `drain_timeout` for the batch under way, and close.

        The consumer of an ordered queue is not cancelled before: the broker would make another one active, which would
        be given what comes behind the deliveries that are held here. Its channel is closed instead, which puts them
        back in front, for the next one to begin with.

        What is not acknowledged then is delivered again, to whoever else consumes the queues.
        """
        if self._tasks is None:
            return
        tasks, self._tasks = self._tasks, None
        self._keeping.cancel()
        try:
            self._stop.set()
            self._changed.set()
            if self._consumers is not None and not self._is_ordered:
                await self._consumers.cancel()
            await asyncio.wait({self._storing}, timeout=self._settings.drain_timeout.total_seconds())
        finally:
            self._storing.cancel()
            await tasks.__aexit__(None, None, None)
            if self._consumers is not None:
                await self._consumers.close()
            await self._broker.consuming.__aexit__()

    # ------------------------------------------------------------------ up and down

    async def _keep_consuming(self, topology: Topology) -> NoReturn:
        pause = _FIRST_RECONNECT
        while True:
            if self._consumers is not None:
                await self._lose(self._consumers)
                pause = _FIRST_RECONNECT
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(_LONGEST_RECONNECT, pause * 2)
            try:
                await self._try_to_consume(topology)
            except InvalidSetting as error:
                self._go_down(error)

    async def _try_to_consume(self, topology: Topology) -> None:
        """Raises InvalidSetting; a broker that cannot be reached only leaves the listener down."""
        consumers = Consumers(
            self._arrive,
            limit_bytes=self._settings.max_message_bytes,
            seconds=self._settings.connect_timeout.total_seconds(),
        )
        try:
            connection = await self._broker.consuming.get()
            await declare(connection, topology, seconds=self._settings.connect_timeout.total_seconds())
            for queue in topology.queues:
                await consumers.add(self._broker.consuming, self._origin(queue.name), self._prefetch)
        except TransportError as error:
            await consumers.close()
            self._go_down(error)
        except BaseException:
            await consumers.close()
            raise
        else:
            self._consumers = consumers
            self._counts["connections"] += 1
            self._counts["down"] = 0
            if self._down_because:
                log.warning("%s is up again", self.address)
                self._down_because = ""

    async def _lose(self, consumers: Consumers) -> None:
        """Return when they are lost; what they brought is delivered again."""
        self._go_down(await asyncio.shield(consumers.lost))
        await consumers.close()
        self._consumers = None
        self._arrived.clear()

    def _go_down(self, reason: InvalidSetting | TransportError) -> None:
        self._counts["dropped"] += 1
        self._counts["down"] = 1
        if str(reason) != self._down_because:  # once, not at every attempt
            self._down_because = str(reason)
            level = logging.ERROR if isinstance(reason, InvalidSetting) else logging.WARNING
            log.log(level, "%s is down: %s", self.address, reason)

    def _origin(self, queue: str) -> Origin:
        """A queue of the topic exchange gets one type only, which its name ends with."""
        match self._source:
            case QueueAddress(message_type=message_type):
                pass
            case SubscriptionAddress():
                message_type = queue.removeprefix(f"{self._service}-")
        return Origin(queue, str(QueueAddress(self._source.broker, queue)), message_type)

    # ------------------------------------------------------------------ what arrives

    def _arrive(self, delivery: Delivery) -> None:
        self._arrived.append(delivery)
        self._changed.set()

    async def _store_arrivals(self, receiver: Receiver) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            self._changed.clear()
            if not self._arrived:
                await self._changed.wait()
                continue
            batch = self._take(receiver.credit())
            kept = await self._store_or_keep(receiver, batch)
            if len(kept) < len(batch):
                pause = _FIRST_PAUSE
            if kept or not batch:
                await self._wait(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _store_or_keep(self, receiver: Receiver, batch: Sequence[Delivery]) -> Sequence[Delivery]:
        """Have the batch stored; what could not be waits at the head of the others, and is returned."""
        try:
            await self._store(receiver, batch)
        except StorageUnavailable as error:
            log.warning("%s keeps what cannot be rejected now: %s", self.address, error)
        except Exception:  # the loop's top: a fault of ours, perhaps in the receiver; nothing is lost by it
            log.exception("%s cannot store %d deliveries", self.address, len(batch))
        kept = [delivery for delivery in batch if not delivery.settled]
        self._arrived.extendleft(reversed(kept))
        return kept

    def _take(self, credit: int) -> list[Delivery]:
        """As many as the receiver has room for, up to what a sending agent would have under way."""
        most = min(credit, self._settings.batch_size * self._settings.batches_in_flight)
        most_bytes = self._settings.batch_bytes * self._settings.batches_in_flight
        batch: list[Delivery] = []
        weight = 0
        while self._arrived and len(batch) < most:
            weight += self._arrived[0].weight_bytes
            if batch and weight > most_bytes:
                break
            batch.append(self._arrived.popleft())
        return batch

    async def _store(self, receiver: Receiver, batch: Sequence[Delivery]) -> None:
        """Store what can be, keep as dead letters what is to be rejected, and acknowledge both."""
        envelopes = [delivery.content for delivery in batch if isinstance(delivery.content, Envelope)]
        if self._is_shared and any(envelope.partition_key for envelope in envelopes):
            self._is_shared = False  # said once
            log.warning(
                "%s: messages with a key arrive over a queue that is not ordered, and two listeners may store them in "
                "another order; write ordered=yes in its address",
                self.address,
            )
        unmappable = {
            position: Rejected(delivery.content.reason)
            for position, delivery in enumerate(batch)
            if isinstance(delivery.content, Unmappable)
        }
        received: Sequence[Outcome] = ()
        if envelopes:
            received = await receiver.receive(self._endpoint, envelopes)
            failpoint("C10")
        outcomes = list(zip(batch, merged(received, unmappable), strict=True))
        await self._acknowledge([it for it, outcome in outcomes if isinstance(outcome, Stored | Duplicate)])
        for delivery, outcome in outcomes:
            if isinstance(outcome, Rejected):
                await receiver.reject(self._endpoint, delivery.raw, outcome.reason, delivery.metadata)
                self._counts["refused"] += 1
                await self._acknowledge([delivery])

    async def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            await acknowledge(deliveries)
            self._counts["batches"] += 1
            self._counts["envelopes"] += len(deliveries)

    async def _wait(self, seconds: float) -> None:
        """So long, unless the listener is closed meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass
