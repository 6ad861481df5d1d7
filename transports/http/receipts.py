"""The outcome of a message, for the client that has sent it, by its id.

    GET /messages/{id}       202  it waits still: ask again, at the same place
    Prefer: wait=10          200  its outcome: handled, dead-lettered, expired, ...
                             404  no message of this id, from this client, is known here

A client that has proven a name sees only what it has sent here itself. Without names, whoever may send here may ask
for the outcome of each message of this service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final
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


class _Waiting:
    """The requests of one app that wait now."""

    def __init__(self) -> None:
        self.count = 0


def routes(door: Door) -> list[BaseRoute]:
    if door.outcomes is None:
        return []
    tell = partial(_tell, door, door.outcomes, _Waiting())
    return [Route("/messages/{message_id:uuid}", tell, methods=["GET"])]


async def _tell(door: Door, outcomes: Outcomes, waiting: _Waiting, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0) as entry:
        at = None if entry.peer is None else scoped(door.endpoint, entry.peer)
    message_id: UUID = request.path_params["message_id"]
    door.open()  # 503 before the bus runs
    seconds = _preferred(request) if waiting.count < _MOST_WAITING else 0
    waiting.count += 1
    try:
        outcome = await outcomes(message_id, at, timedelta(seconds=seconds))
    except UnknownMessage as error:
        raise HTTPException(404, str(error)) from None
    except StorageUnavailable:
        raise HTTPException(503, "the database of this service cannot be used now", RETRY_SOON) from None
    finally:
        waiting.count -= 1
    headers = {"Preference-Applied": f"wait={seconds}"} if seconds else {}
    if outcome is None:
        headers |= {"Location": request.url.path, **RETRY_SOON}
        return _json({"id": message_id, "outcome": "waiting"}, 202, headers)
    return _json(outcome, 200, headers)


def _json(content: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(content), status, {"Cache-Control": "no-store", **headers}, media_type=JSON)


def _preferred(request: Request) -> int:
    """Return the seconds of `Prefer: wait=`; 0 without one. RFC 7240: preferences not understood are ignored."""
    preferences = ",".join(request.headers.getlist("prefer")).replace(";", ",").split(",")
    waits = [found for each in preferences if (found := _WAIT.fullmatch(each))]
    return min(int(waits[0][1]), LONGEST_WAIT) if waits else 0
