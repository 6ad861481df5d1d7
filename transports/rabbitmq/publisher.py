"""A channel with publisher confirms, and the batches on it that the broker has not answered for yet.

aiormq keeps a future for each publish, by delivery tag, and its basic_publish() needs a task, a lock and a timeout
besides. Here a batch is written at once and has one future; what aiormq finds by delivery tag only counts the batch
down. That takes a quarter of the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, cast

from aiormq.channel import Channel
from aiormq.exceptions import (
    ChannelClosed,
    ChannelPreconditionFailed,
    ConnectionCommandInvalid,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    PublishError,
)
from pamqp.commands import Basic
from pamqp.frame import marshal

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidMessage, TransportError, again
from durable.failpoints import failpoint, is_armed
from durable.outcomes import BUSY, STORED, Failed, Outcome, Rejected, printable
from durable.transports.rabbitmq.address import Destination
from durable.transports.rabbitmq.channel import abandon, error_of, flush, is_open, is_writable, reason_of, write
from durable.transports.rabbitmq.message import Sign, content, expiration_of

_PUBLISH_AT_ONCE: Final = 100
_NO_LIMIT: Final = 1 << 31
_LOOK_PAUSE: Final = 0.01  # seconds

# What a broker says when it closes a channel or a connection because of a message that it was sent.
_BLAMES_THE_MESSAGE: Final = (
    ChannelPreconditionFailed,
    ConnectionCommandInvalid,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
_CONTENT_TOO_LARGE: Final = 311
_DECLARE: Final = "start the services that listen there, or run `durable-agent topology APP --apply` for each"


class Unacceptable(TransportError):
    """The broker closed the channel or the connection because of something that it was sent."""


class Publisher:
    """A channel with publisher confirms, and the batches that are not confirmed yet."""

    def __init__(
        self, channel: Channel, address: Destination, *, expires: bool = False, sign: Sign | None = None
    ) -> None:
        """Prepare the publisher. With `expires` the broker is told when a message expires."""
        exchange, routing_key = address.way
        self._channel = channel
        self._address = address
        self._expires = expires
        self._sign = sign
        publish = Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True)
        self._publish = marshal(publish, channel.number)
        self._max_frame_bytes = channel.connection.connection_tune.frame_max or _NO_LIMIT
        self._batches: set[_Batch] = set()
        self._end: TransportError | None = None
        channel.closing.add_done_callback(self._closed)

    @property
    def is_usable(self) -> bool:
        return self._end is None and is_open(self._channel)

    async def publish(self, envelopes: Sequence[Envelope]) -> list[Outcome]:
        """The outcomes in order, once the broker has answered for each."""
        batch = _Batch(len(envelopes))
        self._batches.add(batch)
        try:
            size = len(envelopes) // 2 or 1 if is_armed("C6") else _PUBLISH_AT_ONCE
            for start in range(0, len(envelopes), size):
                await self._write(batch, start, envelopes[start : start + size])
                failpoint("C6")
            failpoint("C7")
            outcomes = await batch.answered
            failpoint("C11")
            return outcomes
        finally:
            self._batches.discard(batch)

    async def drop(self, error: TransportError) -> None:
        """Stop using the channel: unconfirmed messages on it fail."""
        self._fail(error)
        await abandon(self._channel)

    async def _write(self, batch: _Batch, start: int, envelopes: Sequence[Envelope]) -> None:
        if not await is_writable(self._channel) or self._end is not None:
            if self._end is not None:
                batch.fail(self._end)
            return  # otherwise _closed() is about to say why
        # From here on nothing is awaited: the broker counts publishes in the order in which they are written.
        frames: list[bytes] = []
        for index, envelope in enumerate(envelopes, start):
            try:
                frames += self._frames(batch, index, envelope)
            except InvalidMessage as error:
                batch.settle(index, Rejected(printable(str(error))))
        if frames:
            write(self._channel, b"".join(frames))
        if is_armed("C6") or is_armed("C7"):
            # The process is about to die, and the broker is to have these. With its answers unread the system would
            # reset the connection, and the broker might drop them.
            await flush(self._channel)
            await batch.settled(start + len(envelopes))

    def _frames(self, batch: _Batch, index: int, envelope: Envelope) -> list[bytes]:
        channel, message_id = self._channel, str(envelope.id)
        if message_id in channel.message_id_delivery_tag:
            # A message is returned by its id alone: of two under way nobody could tell which one it was.
            batch.settle(index, BUSY)
            return []
        now = None if envelope.deliver_by is None else datetime.now(UTC)
        expiration = expiration_of(envelope, now) if self._expires else None
        frames = content(
            envelope,
            channel=channel.number,
            max_frame_bytes=self._max_frame_bytes,
            now=now,
            expiration=expiration,
            sign=self._sign,
        )
        channel.delivery_tag += 1
        channel.message_id_delivery_tag[message_id] = channel.delivery_tag
        confirmation = _Confirmation(batch, index, channel, message_id)
        channel.confirmations[channel.delivery_tag] = cast("asyncio.Future[object]", confirmation)
        return [self._publish, frames]

    def _closed(self, closing: asyncio.Future[object]) -> None:
        error = error_of(closing)
        reason = f"{self._address}: {reason_of(error)}"
        too_large = isinstance(error, ChannelClosed) and error.args[:1] == (_CONTENT_TOO_LARGE,)
        blamed = too_large or isinstance(error, _BLAMES_THE_MESSAGE)
        self._fail(Unacceptable(reason) if blamed else ConnectionFailed(reason))

    def _fail(self, error: TransportError) -> None:
        self._end = self._end or error
        for batch in self._batches:
            batch.fail(self._end)


class _Batch:
    """The outcomes of a batch, as they come in."""

    def __init__(self, size: int) -> None:
        self.answered: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self._outcomes: list[Outcome | None] = [None] * size
        self._missing = size

    def settle(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._missing -= 1
        if not self._missing and not self.answered.done():
            self.answered.set_result(cast("list[Outcome]", self._outcomes))

    async def settled(self, count: int) -> None:
        """Wait until the first `count` envelopes have an outcome, or the batch has failed."""
        while None in self._outcomes[:count] and not self.answered.done():  # noqa: ASYNC110  for a failpoint only
            await asyncio.sleep(_LOOK_PAUSE)

    def fail(self, error: TransportError) -> None:
        if not self.answered.done():
            self.answered.set_exception(again(error))
            self.answered.exception()  # it counts as retrieved: whoever waited may have been cancelled meanwhile


class _Confirmation:
    """Confirmation of one delivery tag, in the place where aiormq would keep a future."""

    __slots__ = ("_batch", "_channel", "_index", "_message_id", "_settled")

    def __init__(self, batch: _Batch, index: int, channel: Channel, message_id: str) -> None:
        self._batch = batch
        self._index = index
        self._channel = channel
        self._message_id = message_id
        self._settled = False

    def done(self) -> bool:
        return self._settled

    def cancelled(self) -> bool:
        return False

    def set_result(self, frame: object) -> None:
        self._settle(STORED if isinstance(frame, Basic.Ack) else BUSY)

    def set_exception(self, error: BaseException) -> None:
        if isinstance(error, PublishError):
            self._settle(Failed(f"no queue is bound there ({error.args[0]}); {_DECLARE}"))
        else:
            self._settle(BUSY)

    def _settle(self, outcome: Outcome) -> None:
        self._settled = True
        self._channel.message_id_delivery_tag.pop(self._message_id, None)
        self._batch.settle(self._index, outcome)
