"""Description of the endpoints that callers of durable use, as part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from durable.transports.frames import FaultKind
from durable.transports.http.calls import AWAITED, EPOCH, EXPIRES_IN, LONGEST_NAME, SCHEMA, STATUS, VERSION
from durable.transports.http.problems import PROBLEM
from durable.transports.http.wire import ARGUMENTS, DIRECTORY, OFFERS, RESULT

Json = dict[str, Any]

FAULT: Final[Json] = {
    "type": "object",
    "description": "A problem (RFC 9457) that says what became of a call, where it came as far as that",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "fault": {"enum": [kind.value for kind in FaultKind]},
        "error": {"type": "string", "description": "The type of the error that the method raised"},
    },
}
_NAME: Final[Json] = {"type": "string", "pattern": f"^[A-Za-z0-9._-]{{1,{LONGEST_NAME}}}$"}
_HEADERS: Final[Mapping[str, tuple[Json, str]]] = {
    EXPIRES_IN: (
        {"type": "string", "pattern": r"^[1-9][0-9]{0,8}(\.[0-9]{1,6})?$", "examples": ["5"]},
        "Seconds after which the call is not to begin any more",
    ),
    AWAITED: ({"enum": ["yes", "no"]}, "no: the call goes on when the client is gone"),
    EPOCH: ({"type": "string", "pattern": "^[0-9]{1,18}$"}, "The epoch of the singleton that is meant"),
    VERSION: (
        {"type": "string", "pattern": r"^[0-9]{1,6}\.[0-9]{1,6}$", "examples": ["1.2"]},
        "The version of the service that the client has; one that does not fit is refused",
    ),
    SCHEMA: (
        {"type": "string", "pattern": "^([0-9a-f]{2}){1,64}$"},
        "The digest of the method in /offers, as the client has it; of the same version, another one is refused",
    ),
}
_WHY: Final = {
    400: "A header is malformed",
    401: "No credentials, or wrong ones",
    403: "The client may not call this method",
    404: "No such service or method is offered here",
    408: "The arguments did not arrive in time",
    409: "The provider has another version, or does not hold the singleton in this epoch",
    413: "The arguments are too large",
    415: "A content type that is not understood, or a Content-Encoding",
    421: "The request was signed for another service",
    422: "The arguments, or the result, do not fit",
    429: "Too many calls wait already, or too many bytes are under way",
    500: "The method raised an error",
    503: "The call waited for its turn for too long, or the service is ending, or not ready",
}


def paths(longest_wait: int) -> Json:
    """Return the paths. `longest_wait` are the seconds that a client may wait for a change."""
    assert set(STATUS.values()) <= set(_WHY)
    return {
        "/calls/{service}/{method}": {"post": _call()},
        "/offers": {"get": _list("get-offers", "The services that can be called here", OFFERS, longest_wait)},
        "/directory": {"get": _list("get-directory", "All providers that are known here", DIRECTORY, longest_wait)},
    }


def _call() -> Json:
    placed = [{"in": "path", "name": name, "required": True, "schema": _NAME} for name in ("service", "method")]
    headers = [
        {"in": "header", "name": name, "schema": schema, "description": description}
        for name, (schema, description) in _HEADERS.items()
    ]
    return {
        "operationId": "call",
        "summary": "For callers of durable: call a method of a service",
        "parameters": [*placed, *headers],
        "requestBody": {"required": True, "content": {ARGUMENTS: {}}},
        "responses": {"200": {"description": "The result", "content": {RESULT: {}}}}
        | {str(status): _problem(why) for status, why in _WHY.items()},
    }


def _list(operation: str, summary: str, content_type: str, longest_wait: int) -> Json:
    tag = {
        "in": "header",
        "name": "If-None-Match",
        "schema": {"type": "string", "examples": ['"0123456789abcdef0123456789abcdef"']},
        "description": "ETag of the list that is known",
    }
    wait = {
        "in": "header",
        "name": "Prefer",
        "schema": {"type": "string", "examples": ["wait=10"]},
        "description": f"Wait for a change so many seconds, {longest_wait} at most",
    }
    return {
        "operationId": operation,
        "summary": f"For callers of durable: {summary[0].lower()}{summary[1:]}",
        "parameters": [tag | {"description": "The ETag of the last answer"}, wait],
        "responses": {
            "200": {
                "description": summary,
                "headers": {"ETag": {"schema": {"type": "string"}}},
                "content": {content_type: {}},
            },
            "304": {"description": "Nothing has changed"},
        }
        | {str(status): _problem(_WHY[status]) for status in (400, 401, 403, 413, 421, 503)},
    }


def _problem(why: str) -> Json:
    return {"description": why, "content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Fault"}}}}
