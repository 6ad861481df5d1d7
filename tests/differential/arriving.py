"""Envelopes that come to the peer from a stranger, each with its fault: drawn by name, made when they are sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from durable.envelope import DUE, REPLY_TO, Envelope, new_id

_Fields = dict[str, Any]
_SECONDS: Final = timedelta(seconds=1)


def _dated(ago: timedelta) -> UUID:
    """Make an id of so long ago, by the clock of the system, which makes all ids."""
    moment = datetime.now(UTC) - ago
    return UUID(int=int(moment.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | new_id().int & ((1 << 62) - 1))


ARRIVALS: Final[dict[str, Callable[[datetime], _Fields]]] = {
    "whole": lambda now: {},
    "with a key": lambda now: {"partition_key": "k1"},
    "no JSON": lambda now: {"body": b"{"},
    "wrong field": lambda now: {"body": b'{"number":"one"}'},
    "unknown type": lambda now: {"message_type": "os.system"},
    "newer version": lambda now: {"message_type": "differential.aged.v3"},
    "older version": lambda now: {"message_type": "differential.aged"},
    "unknown content type": lambda now: {"content_type": "application/x-unknown"},
    "readable secret": lambda now: {"message_type": "differential.secret"},
    "late": lambda now: {"deliver_by": now - 50 * _SECONDS},
    "soon late": lambda now: {"deliver_by": now + 50 * _SECONDS, "message_type": "differential.strict"},
    "put off": lambda now: {"execution_time": now + 200 * _SECONDS},
    "put off, with its header": lambda now: {
        "execution_time": now + 100 * _SECONDS,
        "headers": {DUE: (now + 100 * _SECONDS).isoformat()},
    },
    "never due": lambda now: {"execution_time": now + 200 * _SECONDS, "deliver_by": now + 150 * _SECONDS},
    "old id": lambda now: {"id": _dated(timedelta(days=7, minutes=1))},
    "id of the future": lambda now: {"id": _dated(-timedelta(days=2))},
    "undated id": lambda now: {"id": uuid4()},
    "undated id, old": lambda now: {"id": uuid4(), "sent_at": now - timedelta(days=8)},
    "sent in the future": lambda now: {"sent_at": now + timedelta(days=2)},
    "nil id": lambda now: {"id": UUID(int=0)},
    "put off too long": lambda now: {"execution_time": now + timedelta(days=8)},
    "asks a stranger": lambda now: {
        "message_type": "differential.question",
        "headers": {REPLY_TO: "tcp://127.0.0.1:1"},
    },
    "asks nowhere": lambda now: {"message_type": "differential.question", "headers": {REPLY_TO: "nowhere"}},
    "answers nothing": lambda now: {"message_type": "differential.answer", "headers": {}},
    "answers a stranger": lambda now: {
        "message_type": "differential.answer",
        "headers": {"in-reply-to": str(UUID(int=17 | 4 << 76 | 2 << 62))},
    },
    "answers no id": lambda now: {"message_type": "differential.answer", "headers": {"in-reply-to": "seventeen"}},
    "event": lambda now: {"message_type": "differential.event"},
    "ordered": lambda now: {"message_type": "differential.whole", "partition_key": "k2"},
}


def arriving(kind: str, number: int, *, destination: str, now: datetime) -> Envelope:
    """Make the envelope of this kind."""
    whole = Envelope(
        id=new_id(),
        message_type="differential.plain",
        destination=destination,
        source="elsewhere",
        correlation_id=new_id(),
        body=msgspec.json.encode({"number": number}),
        sent_at=now,
    )
    return msgspec.structs.replace(whole, **ARRIVALS[kind](now))


def again(envelope: Envelope, *, is_other: bool) -> Envelope:
    """Make the same envelope, or another message under its id."""
    body = b'{"number":0,"script":["raise"]}' if is_other else envelope.body
    return msgspec.structs.replace(envelope, body=body)
