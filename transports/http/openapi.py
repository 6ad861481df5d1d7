"""OpenAPI 3.1 description of the endpoints: GET /openapi.json.

Each message type that is handled now, and that the peer may send, has a path and a schema of its own, made from its
class. The schemas of the classes within have names that begin with the type, so that no two types can be in each
other's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from durable.envelope import JSON
from durable.messages.cloudevents import STRUCTURED
from durable.messages.registry import content_type_of
from durable.messages.upcasting import sent_class
from durable.transports import peers
from durable.transports.http import auth as http_auth
from durable.transports.http import openapi_calls
from durable.transports.http.exchange import Door, admitted
from durable.transports.http.headers import LONGEST_KEY
from durable.transports.http.problems import PROBLEM
from durable.transports.http.receipts import LONGEST_WAIT
from durable.transports.http.wire import BATCH, OUTCOMES
from durable.version import __version__

Json = dict[str, Any]

_SCHEMAS: Final = "#/components/schemas/"
_TEXT: Final[Json] = {"type": "string", "minLength": 1, "maxLength": 1_000}
_TIME: Final[Json] = {"type": "string", "format": "date-time"}
_UUID: Final[Json] = {"type": "string", "format": "uuid"}
_SECONDS: Final[Json] = {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,6})?$", "examples": ["30"]}
_KEY: Final[Json] = {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY}

_ABOUT: Final = """A message is stored before it is answered, and handled once, however often it is sent under one key.

Headers of your own are sent as `Durable-Header-NAME: value`; `traceparent` and `tracestate` are kept."""

_MESSAGE_HEADERS: Final[Mapping[str, tuple[Json, str]]] = {
    "Idempotency-Key": (_KEY, "Recognises a repeat: a UUID, which becomes the message's id, or any printable ASCII"),
    "Durable-Correlation-Id": (_UUID, "The conversation that the message belongs to"),
    "Durable-Partition-Key": (_TEXT, "What the message is about, such as order-17"),
    "Durable-Deliver-By": (_TIME, "It expires when it has not been handled by then"),
    "Durable-Time-To-Live": (_SECONDS, "The same in seconds from its arrival; one of both"),
    "Durable-Execute-At": (_TIME, "It is not handled before"),
    "Durable-Source": (_TEXT, "Who sends it"),
}
_EVENT_HEADERS: Final[Mapping[str, tuple[Json, str]]] = {
    "ce-specversion": ({"type": "string"}, "In binary mode, as all these: the version of CloudEvents, 1.0"),
    "ce-id": ({"type": "string"}, "Recognises a repeat, together with ce-source"),
    "ce-source": ({"type": "string"}, "Who sends the event"),
    "ce-type": ({"type": "string"}, "The message type"),
    "ce-time": ({"type": "string"}, "When it happened"),
}
_EVENT: Final[Json] = {
    "type": "object",
    "description": "An event in the JSON format of CloudEvents 1.0; attributes of your own may be added",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": _TEXT | {"description": "Recognises a repeat, together with the source"},
        "source": _TEXT,
        "type": _TEXT | {"description": "The message type"},
        "time": _TIME,
        "expirytime": _TIME | {"description": "It expires when it has not been handled by then"},
        "partitionkey": _TEXT,
        "datacontenttype": _TEXT | {"default": JSON},
        "data": {},
        "data_base64": {"type": "string", "contentEncoding": "base64"},
    },
    "propertyNames": {"pattern": "^([a-z0-9]+|data_base64)$"},
    "additionalProperties": {"type": ["string", "integer", "boolean", "null"]},
    "oneOf": [{"required": ["data"]}, {"required": ["data_base64"]}],
}
_RECEIPT: Final[Json] = {
    "type": "object",
    "required": ["id", "type"],
    "properties": {"id": {"type": "string"}, "type": {"type": "string"}, "message": _UUID},
    "examples": [{"id": "019b76da-a800-7cc1-8a2f-2b1c0d9a3e41", "type": "orders.order-placed"}],
}
_OUTCOME: Final[Json] = {
    "type": "object",
    "required": ["id", "outcome"],
    "properties": {
        "id": _UUID,
        "type": {"type": "string"},
        "outcome": {"enum": ["waiting", "handled", "sent", "cancelled", "expired", "discarded", "dead-lettered"]},
        "reason": {"type": ["string", "null"], "description": "Why the message was not handled"},
        "deliveries": {
            "type": "array",
            "description": "The outcome in each place: of an event, that of each subscriber",
            "items": {
                "type": "object",
                "required": ["side", "address", "outcome"],
                "properties": {
                    "side": {"enum": ["incoming", "outgoing"]},
                    "address": {"type": "string"},
                    "outcome": {"type": "string"},
                    "reason": {"type": ["string", "null"]},
                    "ended_at": {"type": ["string", "null"], "format": "date-time"},
                    "attempts": {"type": "integer"},
                },
            },
        },
    },
}
_WAITING: Final[Json] = {
    "type": "object",
    "required": ["id", "outcome"],
    "properties": {"id": _KEY, "outcome": {"const": "waiting"}},
}
_REQUEST_ID: Final[Json] = {
    "in": "path",
    "name": "id",
    "required": True,
    "schema": _KEY | {"pattern": f"^[ -.0-~]{{1,{LONGEST_KEY}}}$"},
    "description": "Recognises a repeat: any printable ASCII but a slash, chosen by the client",
}
_PREFER: Final[Json] = {
    "in": "header",
    "name": "Prefer",
    "schema": {"type": "string", "examples": ["wait=10"]},
    "description": f"Wait for the end so many seconds, {LONGEST_WAIT} at most",
}
_PROBLEM: Final[Json] = {
    "type": "object",
    "description": "Problem Details (RFC 9457)",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong here, and what to do about it"},
    },
    "examples": [{"type": "about:blank", "title": "Unauthorized", "status": 401, "detail": "show shared_secret"}],
}
_WHY: Final = {
    400: "A header or the body is malformed",
    401: "No credentials, or wrong ones",
    403: "The sender may not send this, or not here",
    404: "No message of this id, from this client, is known here",
    405: "This is no id: messages of a type are posted here",
    408: "The body did not arrive in time",
    409: "The request was stored with another body, or is a dead letter",
    410: "The request expired or was given up, or its answer was forgotten",
    413: "The body is too large",
    415: "A content type that is not understood, or a Content-Encoding",
    421: "The request was signed for another service",
    422: "The message can never be handled, or its key was used with another message",
    429: "As many bytes as may be are under way: try again soon",
    500: "The encrypted answer was changed, or its key has other bytes here",
    503: "Nothing can be stored or read now: try again soon, under the same key",
}
_SECURITY: Final[Json] = {
    "signature": {"type": "http", "scheme": http_auth.SCHEME, "description": "A signature of this request"},
    "bearer": {"type": "http", "scheme": "bearer", "description": "The secret itself"},
}


def routes(door: Door) -> list[BaseRoute]:
    return [Route("/openapi.json", partial(_describe, door), methods=["GET"])]


async def _describe(door: Door, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0) as entry:
        secured = peers.has_secrets(door.settings)
        url = request.scope.get("root_path") or "/"
        may = {name: cls for name, cls in door.messages().items() if peers.may_send(door.settings, entry.peer, name)}
        return JSONResponse(describe(door.service, may, secured=secured, url=url))


def describe(service: str, messages: Mapping[str, type], *, secured: bool = True, url: str = "/") -> Json:
    """The OpenAPI document of a service at this URL that handles these messages."""
    schemas: Json = {
        "CloudEvent": _EVENT,
        "Outcome": _OUTCOME,
        "Fault": openapi_calls.FAULT,
        "Problem": _PROBLEM,
        "Receipt": _RECEIPT,
        "Waiting": _WAITING,
    }
    sent = {name: sent_class(name, messages[name]) for name in sorted(messages)}
    types = {name: _schema(name, cls, schemas) for name, cls in sent.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Messages for {service}", "version": __version__, "description": _ABOUT},
        "servers": [{"url": url}],
        "security": [{"signature": []}, {"bearer": []}] if secured else [],
        "paths": _paths(types, sent),
        "components": {
            "schemas": schemas,
            "responses": {str(status): _answer(why, PROBLEM, _ref("Problem")) for status, why in _WHY.items()},
            "securitySchemes": _SECURITY,
        },
    }


def _schema(message_type: str, cls: type, schemas: Json) -> Json:
    """The schema of this class; those that it refers to are added to `schemas`."""
    prefix = f"{message_type}."
    try:
        if issubclass(cls, BaseModel):
            schema = cls.model_json_schema(ref_template=f"{_SCHEMAS}{prefix}{{model}}")
            inner = schema.pop("$defs", {})
        else:
            [schema], inner = msgspec.json.schema_components([cls], ref_template=f"{_SCHEMAS}{prefix}{{name}}")
    except Exception as error:  # the class's own hooks are called, and may raise anything
        return {"description": f"{cls.__qualname__} cannot be described: {type(error).__name__}"}
    schemas.update({prefix + name: part for name, part in inner.items()})
    return schema


def _paths(types: Mapping[str, Json], sent: Mapping[str, type]) -> Json:
    paths = {f"/messages/{name}": {"post": _post_message(name, schema, sent[name])} for name, schema in types.items()}
    if types:
        paths["/messages"] = {"post": _post_event(types)}
    paths["/messages/{id}"] = {"get": _get_outcome()}
    if types:
        paths["/requests/{id}"] = {"put": _put_request(types), "delete": _forget_answer()}
        paths["/requests/{id}/result"] = {"get": _get_answer()}
    paths["/batches"] = {
        "post": {
            "summary": "For senders of durable: envelopes in, their outcomes out",
            "requestBody": {"required": True, "content": {BATCH: {}}},
            "responses": {"200": _answer("An outcome for each envelope, in order", OUTCOMES)}
            | _problems(400, 401, 403, 408, 413, 415, 421, 429, 503),
        }
    }
    paths |= openapi_calls.paths(LONGEST_WAIT)
    paths["/ping"] = {"post": _asked("Could a batch be stored now, with these credentials?", 401, 403, 413, 421, 503)}
    paths["/health/live"] = {"get": _asked("Does this process answer?") | {"security": []}}
    paths["/health/ready"] = {"get": _asked("Could it store a message now?", 503) | {"security": []}}
    document = _answer("This document", JSON, {"type": "object"})
    paths["/openapi.json"] = {"get": {"summary": "This document", "responses": {"200": document} | _problems(401)}}
    return paths


def _post_message(message_type: str, schema: Json, cls: type) -> Json:
    """Describe POST of one message, in JSON or in the encoding of its class."""
    content = {content_type_of(cls): {}, JSON: schema}
    content.pop(STRUCTURED, None)
    return {"operationId": f"send-{message_type}"} | _storing(message_type, _MESSAGE_HEADERS, content)


def _post_event(types: Mapping[str, Json]) -> Json:
    events = [
        {"allOf": [_ref("CloudEvent")], "properties": {"type": {"const": name}, "data": schema}}
        for name, schema in types.items()
    ]
    content = {STRUCTURED: {"oneOf": events}, JSON: {"anyOf": list(types.values())}}
    return {"operationId": "send-event"} | _storing("a CloudEvent, in either mode", _EVENT_HEADERS, content)


def _get_outcome() -> Json:
    return {
        "operationId": "get-outcome",
        "summary": "Ask what became of a message",
        "parameters": [{"in": "path", "name": "id", "required": True, "schema": _UUID}, _PREFER],
        "responses": {
            "200": _answer("Its outcome", JSON, _ref("Outcome")),
            "202": _answer("It waits still: ask again", JSON, _ref("Outcome")),
        }
        | _problems(401, 403, 404, 405, 413, 421, 503),
    }


def _put_request(types: Mapping[str, Json]) -> Json:
    asked = {"in": "query", "name": "type", "required": True, "schema": {"enum": list(types)}}
    headers = {name: given for name, given in _MESSAGE_HEADERS.items() if name != "Idempotency-Key"}
    put = _storing("a request whose answer is kept", headers, {JSON: {"anyOf": list(types.values())}})
    put["parameters"] = [_REQUEST_ID, asked | {"description": "The message type"}, *put["parameters"]]
    put["responses"]["201"] = _answer("It is stored, and will be handled", JSON, _ref("Receipt"))
    del put["responses"]["202"]
    return {"operationId": "put-request"} | put | {"responses": put["responses"] | _problems(404, 409)}


def _get_answer() -> Json:
    answer = {
        "description": "The answer, in the encoding of its class",
        "headers": {"Durable-Message-Type": {"schema": {"type": "string"}, "description": "The type of the answer"}},
        "content": {JSON: {}},
    }
    return {
        "operationId": "get-answer",
        "summary": "Ask for the answer to a request",
        "parameters": [_REQUEST_ID, _PREFER],
        "responses": {"200": answer, "202": _answer("There is none yet: ask again", JSON, _ref("Waiting"))}
        | _problems(400, 401, 403, 404, 409, 410, 413, 421, 500, 503),
    }


def _forget_answer() -> Json:
    return {
        "operationId": "forget-answer",
        "summary": "Forget the answer to a request, also one that is to come",
        "parameters": [_REQUEST_ID],
        "responses": {"204": {"description": "It is forgotten"}} | _problems(400, 401, 403, 404, 413, 421, 503),
    }


def _storing(what: str, headers: Mapping[str, tuple[Json, str]], content: Mapping[str, Json]) -> Json:
    return {
        "summary": f"Send {what}",
        "parameters": [
            {"in": "header", "name": name, "schema": schema, "description": description}
            for name, (schema, description) in headers.items()
        ],
        "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind, schema in content.items()}},
        "responses": {
            "202": _answer("It is stored, and will be handled", JSON, _ref("Receipt")),
            "200": _answer("It was stored before", JSON, _ref("Receipt")),
        }
        | _problems(*(status for status in _WHY if status not in (404, 405, 409, 410, 500))),
    }


def _asked(question: str, *problems: int) -> Json:
    return {"summary": question, "responses": {"204": {"description": "Yes"}} | _problems(*problems)}


def _answer(description: str, kind: str, schema: Json | None = None) -> Json:
    return {"description": description, "content": {kind: {} if schema is None else {"schema": schema}}}


def _problems(*statuses: int) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _ref(name: str) -> Json:
    return {"$ref": _SCHEMAS + name}
