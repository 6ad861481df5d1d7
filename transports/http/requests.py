"""Requests with answers, exactly once, for any HTTP client: the client names them, and repeats what it is not sure of.

    PUT    /requests/{id}?type=...    201  stored now                    409  stored before, with another body
                                      200  stored before, as it is
    GET    /requests/{id}/result      200  the answer, as often as it is asked for
    Prefer: wait=10                   202  none yet: ask again, at the same place
                                      409  the request is a dead letter, which an operator may replay
                                      410  it expired or was given up, or its answer was forgotten
                                      500  its answer was changed since it was encrypted
                                      503  the key of its answer is not here now
    DELETE /requests/{id}             204  the answer is forgotten, also one that is to come

The handler answers by `ctx.reply()`, with a message of a class that is declared by bus.expects(). A request is
remembered for `dedupe_window`: after that, the same id is a new request, and the answer to the former one is
forgotten. An answer is kept for `answer_retention`. The id of a request is any text of the client without a slash:
it is told from the ids of other clients that have proven a name.
"""

from __future__ import annotations

from functools import partial
from typing import Final
from uuid import UUID

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from durable.envelope import REPLY_TO
from durable.errors import Forged, MissingKey, NoAnswer
from durable.messages.routing import LOCAL
from durable.messages.scope import scoped
from durable.telemetry import log
from durable.transports.http import headers as http_headers
from durable.transports.http.exchange import RETRY_SOON, Door, Outcomes, admitted
from durable.transports.http.messages import class_of, content_types, envelope_of_message, refuse_unfit, refused, store
from durable.transports.http.receipts import json, place_of, still_waiting, waiting

MESSAGE_TYPE: Final = "Durable-Message-Type"
"""The header that tells the type of an answer."""


def routes(door: Door) -> list[BaseRoute]:
    if door.outcomes is None:
        return []
    return [
        Route("/requests/{request_id}", partial(_store, door, door.outcomes), methods=["PUT"]),
        Route("/requests/{request_id}", partial(_forget, door, door.outcomes), methods=["DELETE"]),
        Route("/requests/{request_id}/result", partial(_tell, door, door.outcomes), methods=["GET"]),
    ]


async def _store(door: Door, outcomes: Outcomes, request: Request) -> Response:
    async with admitted(request, door, *content_types(), most_bytes=door.settings.max_message_bytes) as entry:
        message_id = _id_of(door, request, entry.peer)
        message_type = request.query_params.get("type", "")
        if not message_type:
            raise HTTPException(400, "the type of the message is missing: put it to /requests/{id}?type=...")
        cls = class_of(door, message_type, status=404)
        with refused(400):
            envelope = envelope_of_message(door, message_type, request, entry.body, message_id)
        envelope = msgspec.structs.replace(envelope, headers={**envelope.headers, REPLY_TO: LOCAL})
        refuse_unfit(door, envelope, cls, entry.peer)
        with waiting(door, request):
            await outcomes.begin(message_id, scoped(door.endpoint, entry.peer))
        is_new = await store(door, envelope, entry.peer, key="id of a request", status_of_conflict=409)
    shown = {"id": request.path_params["request_id"], "type": message_type, "message": message_id}
    return json(shown, 201 if is_new else 200, {"Location": f"{place_of(request)}/result"})


async def _tell(door: Door, outcomes: Outcomes, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0) as entry:
        message_id = _id_of(door, request, entry.peer)
    with waiting(door, request) as wait:
        try:
            answer = await outcomes.answer(message_id, wait.patience)
        except NoAnswer as error:
            raise HTTPException(409 if error.may_come else 410, str(error)) from None
        except MissingKey as error:
            raise HTTPException(503, f"the answer is encrypted: {error}", RETRY_SOON) from None
        except Forged as error:
            log.error("the answer to request %s cannot be told: %s", message_id, error)
            raise HTTPException(500, str(error)) from None
    if answer is None:
        return still_waiting(request, {"id": request.path_params["request_id"], "outcome": "waiting"}, wait)
    headers = {**wait.headers, "Cache-Control": "no-store", MESSAGE_TYPE: answer.message_type}
    return Response(answer.body, 200, headers, media_type=answer.content_type)


async def _forget(door: Door, outcomes: Outcomes, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0) as entry:
        message_id = _id_of(door, request, entry.peer)
    with waiting(door, request):
        await outcomes.forget(message_id)
    return Response(status_code=204)


def _id_of(door: Door, request: Request, peer: str | None) -> UUID:
    """Return the id of the message of this request: no message that came in another way has it."""
    request_id: str = request.path_params["request_id"]
    if not http_headers.is_key(request_id):
        raise HTTPException(400, f"the id of a request is 1 to {http_headers.LONGEST_KEY} printable ASCII characters")
    if request_id in (".", ".."):
        raise HTTPException(400, f"the id of a request is not {request_id!r}: clients take it for another path")
    return http_headers.id_of(f"request {request_id}", scoped(door.endpoint, peer), "")
