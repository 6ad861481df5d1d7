"""Targets: whole exchanges with a running node, over TCP and over HTTP, of strangers and of those who know a secret."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from durable.envelope import JSON
from durable.messages.cloudevents import STRUCTURED
from durable.transports.http.wire import BATCH
from tests.fuzz import codecs, wire
from tests.fuzz.damage import damaged, pieces
from tests.fuzz.nodes import SECRET, SECURED, Exchange, attacked
from tests.fuzz.requests import requests
from tests.fuzz.targets import MakeDatabase, Open, Target

_endings = st.sampled_from(["half-close", "half-close", "leave", "reset"])
_TOKEN = f"Authorization: Bearer {SECRET}"

_sold = st.fixed_dictionaries(
    {}, optional={"number": codecs.json_values, "total": codecs.json_values, "note": codecs.json_values}
)
_bodies = {
    BATCH: wire.batches,
    JSON: _sold.map(msgspec.json.encode),
    STRUCTURED: codecs.events,
}


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(list(_bodies)))
    lines = [f"Content-Type: {kind}"] + ([_TOKEN] if draw(st.integers(0, 3)) else [])
    return draw(requests(_bodies[kind], *lines))


def _exchanges(streams: st.SearchStrategy[bytes]) -> st.SearchStrategy[Exchange]:
    return st.builds(Exchange, pieces(streams, most=2), _endings)


def _on(scheme: str, **settings: Any) -> Open:
    def open_(make_database: MakeDatabase) -> Any:
        return attacked(make_database("fuzz"), scheme, **settings)

    return open_


_of_http = damaged(st.lists(_requests(), min_size=1, max_size=2).map(b"".join), most=1)
_of_tcp = damaged(wire.of_clients, most=1)

TARGETS = [
    Target("node-http", _exchanges(_of_http), _on("http", **SECURED), examples=40, keeps_state=True),
    Target(
        "node-tcp",
        _exchanges(_of_tcp),
        _on("tcp"),
        examples=40,
        known=[Exchange([wire.torn], "half-close"), Exchange([wire.torn], "reset")],
        keeps_state=True,
    ),
    Target("node-tcp-secret", _exchanges(_of_tcp), _on("tcp", **SECURED), examples=20, keeps_state=True),
]
