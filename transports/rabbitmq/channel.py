"""Channels of aiormq: writing frames on them, and what their errors mean.

A channel's own methods write one frame, and some wait for the socket each time. Here whole batches of frames go into
the queue of the connection's writer at once: right after is_writable() there is room, and until write() nothing is
awaited, so that frames are written in the order in which they were counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Final

from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, ChannelAccessRefused, InvalidFrameError
from pamqp import commands as spec
from pamqp.frame import marshal

from durable.errors import ConnectionFailed, PeerTimeout
from durable.tasks.cancelling import raise_if_cancelled

_FULL_QUEUE_PAUSE: Final = 0.001


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate errors of aio-pika, and of the network below it, to TransportErrors.

    A task that is asked to end does so: aiormq turns its cancellation into an error of the channel.
    """
    try:
        yield
    except TimeoutError as error:
        raise_if_cancelled(error)
        raise PeerTimeout(f"{doing}: the broker took too long") from error
    except asyncio.CancelledError as error:
        # What waits for a broker that went silent is told so by aiormq as a cancellation, though nobody cancelled.
        raise_if_cancelled(error)
        raise ConnectionFailed(f"{doing}: the broker went silent") from error
    except (AMQPError, OSError, RuntimeError) as error:  # the last: of what is closed already
        raise_if_cancelled(error)
        raise ConnectionFailed(f"{doing}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Return the reason of the broker or the network. It holds no password: aiormq puts no URL into errors."""
    if isinstance(error, asyncio.CancelledError):
        return "the broker went silent"
    if isinstance(error, InvalidFrameError) and "Connection.OpenOk" in str(error):  # aiormq drops what the broker said
        return (
            "the broker refuses the virtual host: there is none of that name, this user may not enter it, it is down, "
            "or its limit of connections is reached; the broker's log says which"
        )
    said = " ".join(str(part) for part in error.args if part is not None) or type(error).__name__
    if isinstance(error, ChannelAccessRefused):
        return f"{said}; let rabbitmqctl set_{'topic_' if 'to topic' in said else ''}permissions allow it"
    return said


def error_of(closing: asyncio.Future[Any]) -> BaseException:
    """Return the reason for which a channel was closed."""
    if closing.cancelled():
        return asyncio.CancelledError()
    return closing.exception() or ConnectionFailed()


def is_open(channel: Channel) -> bool:
    """True while frames may be written. A closed channel's number is soon that of another."""
    return not channel.is_closed and channel.connection.channels.get(channel.number) is channel


async def is_writable(channel: Channel) -> bool:
    """Wait until write() has room for one more; False when the channel is closed."""
    while is_open(channel) and channel.write_queue.full():  # noqa: ASYNC110  a queue tells nobody that it has room
        await asyncio.sleep(_FULL_QUEUE_PAUSE)
    return is_open(channel)


def write(channel: Channel, data: bytes) -> None:
    """Write whole frames of this channel, right after is_writable()."""
    channel.write_queue.put_nowait(ChannelFrame(payload=data, should_close=False))


async def flush(channel: Channel) -> None:
    """Wait until the socket has taken all written bytes. While a broker reads nothing, this waits for ever."""
    flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if await is_writable(channel):
        channel.write_queue.put_nowait(ChannelFrame(payload=b"", should_close=False, drain_future=flushed))
        await flushed


async def abandon(channel: Channel) -> None:
    """Close the channel without waiting for it: a connection cut off from its broker would never answer."""
    if await is_writable(channel):
        write(channel, marshal(spec.Channel.Close(200, "abandoned", 0, 0), channel.number))
