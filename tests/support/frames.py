"""Frames that encode() would never make."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec

from durable.transports.frames import FrameKind


def raw_frame(kind: int, payload: bytes, channel: int = 7, crc: int | None = None, length: int | None = None) -> bytes:
    """A frame with whatever is asked for in it, and a CRC that fits unless another is given."""
    tail = struct.pack("!BI", kind, channel)
    crc = zlib.crc32(tail + payload) if crc is None else crc
    return struct.pack("!I", 9 + len(payload) if length is None else length) + tail + struct.pack("!I", crc) + payload


def batch_of(*items: Any, count: int | None = None) -> bytes:
    """A BATCH frame that holds these, envelopes or not."""
    held = [len(items) if count is None else count, list(items)]
    return raw_frame(FrameKind.BATCH, msgspec.msgpack.Encoder(uuid_format="bytes").encode(held))
