"""The outcome of a message, for the client that has sent it, by its id.

    GET /messages/{id}       202  it waits still: ask again, at the same place
    Prefer: wait=10          200  its outcome: handled, dead-lettered, expired, ...
                             404  no message of this id, from this client, is known here

A client that has proven a name sees only what it has sent here itself. Without names, whoever may send here may ask
for the outcome of each message of this service.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import quote
from uuid import UUID

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from durable.envelope import JSON
from durable.errors import StorageUnavailable, UnknownMessage
from durable.messages.scope import scoped
from durable.transports.http.exchange import RETRY_SOON, Door, Outcomes, admitted

LONGEST_WAIT: Final = 60
"""Seconds that a request waits at most, whatever it prefers: proxies cut longer ones off."""

_MOST_WAITING: Final = 1_000  # requests of one app; others are answered at once
_WAIT: Final = re.compile(r"\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*", re.ASCII | re.IGNORECASE)


def routes(door: Door) -> list[BaseRoute]:
    if door.outcomes is None:
        return []
    tell = partial(_tell, door, door.outcomes)
    return [Route("/messages/{message_id:uuid}", tell, methods=["GET"])]


async def _tell(door: Door, outcomes: Outcomes, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0) as entry:
        at = None if entry.peer is None else scoped(door.endpoint, entry.peer)
    message_id: UUID = request.path_params["message_id"]
    with waiting(door, request) as wait:
        outcome = await outcomes.outcome(message_id, at, wait.patience)
    if outcome is None:
        return still_waiting(request, {"id": message_id, "outcome": "waiting"}, wait)
    return json(outcome, 200, wait.headers)


class Wait(NamedTuple):
    """Time that a request may wait, and the headers that tell of it."""

    patience: timedelta
    headers: Mapping[str, str]


@contextmanager
def waiting(door: Door, request: Request) -> Iterator[Wait]:
    """Count a request that waits, as long as it prefers, and answer errors of the look. Raises HTTPException."""
    door.open()  # 503 before the bus runs
    seconds = _preferred(request) if door.waiting["requests"] < _MOST_WAITING else 0
    door.waiting["requests"] += 1
    try:
        yield Wait(timedelta(seconds=seconds), {"Preference-Applied": f"wait={seconds}"} if seconds else {})
    except UnknownMessage as error:
        raise HTTPException(404, str(error)) from None
    except StorageUnavailable:
        raise HTTPException(503, "the database of this service cannot be used now", RETRY_SOON) from None
    finally:
        door.waiting["requests"] -= 1


def still_waiting(request: Request, content: Mapping[str, Any], wait: Wait) -> Response:
    """Answer that there is nothing to tell yet, and that the client may ask again at the same place."""
    return json(content, 202, {**wait.headers, "Location": place_of(request), **RETRY_SOON})


def place_of(request: Request) -> str:
    """Return the path of a request as a client has to send it: an id in it may hold a space or a question mark."""
    path: str = request.scope["path"]  # request.url ends at a question mark
    return quote(path)


def json(content: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> Response:
    """Answer in JSON, which nobody may keep."""
    return Response(msgspec.json.encode(content), status, {"Cache-Control": "no-store", **headers}, media_type=JSON)


def _preferred(request: Request) -> int:
    """Return the seconds of `Prefer: wait=`; 0 without one. RFC 7240: preferences not understood are ignored."""
    preferences = ",".join(request.headers.getlist("prefer")).replace(";", ",").split(",")
    waits = [found for each in preferences if (found := _WAIT.fullmatch(each))]
    return min(int(waits[0][1]), LONGEST_WAIT) if waits else 0
