"""Target: the HTTP endpoints of a running node, with requests that schemathesis makes from their description.

A request that the description allows, or forbids, gets an answer that the description has for it, in the form that it
says; a request that it forbids is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok

from durable.transports.http.openapi import describe
from durable.transports.http.wire import ARGUMENTS, BATCH
from tests.fuzz import wire
from tests.fuzz.damage import damaged
from tests.fuzz.nodes import SECRET, SECURED, Node
from tests.fuzz.targets import MakeDatabase, Target
from tests.support.http_shop import Counted, Sold

MESSAGES = {"web.sold": Sold, "web.counted": Counted}
DESCRIPTION = describe("shop", MESSAGES)
CHECKED = [
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "ignored_auth",
]

schemathesis.openapi.format("decimal", st.decimals(allow_nan=False, allow_infinity=False).map(str))
schemathesis.openapi.media_type(BATCH, damaged(wire.batches))
schemathesis.openapi.media_type(ARGUMENTS, st.binary(max_size=1_000))


@schemathesis.serializer(BATCH, ARGUMENTS)
def serialized(_: Any, value: Any) -> bytes:
    """Bodies of batches and of calls are bytes already, but for those that schemathesis makes wrong on purpose."""
    return value if isinstance(value, bytes) else repr(value).encode(errors="backslashreplace")


load_all_checks()
_checks: Any = CHECKS.get_by_names(CHECKED)
_takes_what_it_describes: Any = CHECKS.get_by_names(["positive_data_acceptance"])
_takes_nothing_else: Any = CHECKS.get_by_names(["negative_data_rejection"])
_operations = [
    found.ok() for found in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations() if isinstance(found, Ok)
]

cases: st.SearchStrategy[Case[Any]] = st.one_of(
    [operation.as_strategy(mode) for operation in _operations for mode in GenerationMode]
    + [operation.as_strategy(headers={}) for operation in _operations]
)


def _is_described(case: Case[Any]) -> bool:
    """False where rules are beyond a schema: bytes of a batch, events, headers that exclude others, 0.0 as an int, and
    requests that were made before.
    """
    takes_messages = case.operation.path in ("/batches", "/messages") or case.operation.method == "put"
    is_of_the_past = case.operation.path.startswith(("/calls", "/requests"))  # to services that the node does not offer
    return not takes_messages and not is_of_the_past and not case.headers


def _is_more_than_described(case: Case[Any]) -> bool:
    """True for a number where a decimal number is described as text: msgspec reads both."""
    total = case.body.get("total") if isinstance(case.body, dict) else None
    return isinstance(total, int | float) and not isinstance(total, bool)


@contextmanager
def _asked(make_database: MakeDatabase) -> Iterator[Callable[[Case[Any]], str]]:
    with Node(make_database("fuzz"), "http", **SECURED) as node:

        def check(case: Case[Any]) -> str:
            response = case.call(base_url=node.address, headers={"Authorization": f"Bearer {SECRET}"})
            checks = [
                *_checks,
                *(_takes_what_it_describes if _is_described(case) else []),
                *([] if _is_more_than_described(case) else _takes_nothing_else),
            ]
            case.validate_response(response, checks=checks)
            if case.operation.path == "/openapi.json" and response.status_code == 200:
                assert response.json()["paths"] == DESCRIPTION["paths"]
            node.is_unharmed()
            return f"{case.operation.path} {response.status_code}"

        yield check


TARGETS = [Target("http-described", cases, _asked, examples=60, keeps_state=True)]
