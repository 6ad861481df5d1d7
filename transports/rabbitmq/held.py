"""Deliveries that a listener holds in memory, in order, until each is stored.

    of a consumer at work                stored, and acknowledged
    of a lost one, and its queue stays   dropped: the broker delivers them again, here or elsewhere
    of a lost one, cancelled by the      ordered: dropped, as another node may have stored what comes behind them
    broker: the queue was deleted        otherwise: stored, as nobody delivers them again

For an ordered queue this is asked each time that deliveries are taken: a consumer is lost at once, and leaving it takes
a conversation with the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from durable.transports.rabbitmq.consumers import Delivery


class Held:
    """Deliveries of the queues of one listener. `is_ordered`: a single consumer has all of a queue."""

    def __init__(self) -> None:
        self.is_ordered = False
        self.bytes = 0
        self._deliveries: deque[Delivery] = deque()

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self.bytes += delivery.weight_bytes

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Put these before all others again, in their order."""
        self._deliveries.extendleft(reversed(deliveries))
        self.bytes += sum(each.weight_bytes for each in deliveries)

    def take(self, most: int, most_bytes: int) -> list[Delivery]:
        """Take the first: at most so many, and no more bytes unless the first alone has more."""
        taken: list[Delivery] = []
        weight = 0
        while self._deliveries and len(taken) < most:
            weight += self._deliveries[0].weight_bytes
            if taken and weight > most_bytes:
                break
            taken.append(self._deliveries.popleft())
        self.bytes -= sum(each.weight_bytes for each in taken)
        return taken

    def drop_lost(self) -> Sequence[Delivery]:
        """Drop deliveries that may not be stored any more; return those that nobody delivers again."""
        dropped = [each for each in self._deliveries if not self._may_be_stored(each)]
        if dropped:
            self._deliveries = deque(each for each in self._deliveries if self._may_be_stored(each))
            self.bytes = sum(each.weight_bytes for each in self._deliveries)
        return [each for each in dropped if each.consumer.is_cancelled]

    def _may_be_stored(self, delivery: Delivery) -> bool:
        consumer = delivery.consumer
        return not consumer.is_lost or (consumer.is_cancelled and not self.is_ordered)
