"""Replays under the same ids: a message that this service has handled is not handled by it again, wherever it goes.

    side, address     as history has them: it came in, it was local, it was sent to a peer or to this service itself
    destination       none, the inbox, an address of this service by its code or by the database, a peer's
    whose             archived by this service, by another one, or by nobody knows whom

Each message was handled here before, at the endpoint of its row, or else at that of the listener.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession

from durable.messages.routing import LOCAL
from durable.pipeline import choosing, replay
from durable.settings import load_settings
from tests.pipeline.test_replay import history
from tests.support.command import Agent, Ended
from tests.support.publishing import Outbox

pytestmark = pytest.mark.timeout(600)

HERE, OTHER = "sa", "sb"
BY_CODE, BY_DATABASE, PEER = "tcp://0.0.0.0:2401", "tcp://sa-1:2402", "tcp://sb:2301"
OWN = ("tcp://127.0.0.1:2401", BY_DATABASE)
ROWS = 2
IDS = "unhex(lpad(hex(n + 1), 32, '0'))"

SIDES: dict[str, tuple[str, str]] = {
    "came in": ("incoming", HERE),
    "local": ("incoming", LOCAL),
    "sent": ("outgoing", PEER),
    "sent to itself": ("outgoing", OWN[0]),
}
DESTINATIONS: dict[str, str | None] = {
    "none": None,
    "the inbox": LOCAL,
    "a listener of the code": OWN[0],
    "a listener of the database": OWN[1],
    "a peer": "tcp://sc:2301",
}
WHOSE = {"own": HERE, "another's": OTHER}
ACCEPTED = {
    *(("own", side, "none") for side in SIDES),
    ("own", "came in", "the inbox"),
    ("own", "local", "the inbox"),
    ("own", "sent", "a peer"),
    ("own", "sent to itself", "a peer"),
    ("own", "sent to itself", "a listener of the code"),
}
"""All others are refused."""
LOST: dict[str, set[str]] = {"came in": {HERE}, "local": {LOCAL}, "sent": set(), "sent to itself": {HERE}}
"""The endpoints where a message comes in that is not known."""


class Known(NamedTuple):
    """A message by its id, at an endpoint."""

    id: str
    endpoint: str


class Service:
    """A service whose database has handled messages, and its command."""

    def __init__(self, spark: SparkSession, agent: Agent, url: str, folder: Path) -> None:
        self.spark, self.agent, self.folder = spark, agent, folder
        self.outbox = Outbox(url)
        name = agent.application(f'\nbus = Bus("{HERE}", database="{url}")\nbus.listen("{BY_CODE}")\n')
        self.bus = f"{name}:bus"
        self.files = 0

    def be_known(self) -> None:
        """Let the database know its service, and an address of it."""
        self.outbox.rows("INSERT INTO durable.nodes (service, description, version) VALUES (%s, '', '')", HERE)
        self.outbox.rows(
            "INSERT INTO durable.offers (service, source, node_id, application, node, machine, version, digest, "
            "signatures, addresses, since, leased_until) SELECT 'prices', 'node 1', node_id, 'sa', node_id, 'm', '1', "
            "'', '[]', ARRAY[%s], now(), now() - interval '1 day' FROM durable.nodes",
            BY_DATABASE,
        )

    def handle(self, *endpoints: str) -> None:
        """Handle the messages once at each of these endpoints."""
        for endpoint in endpoints:
            rows = choosing.complete(history(self.spark, ROWS, id=IDS, side="'incoming'", address=f"'{endpoint}'"))
            named = replay.messages(rows, name="x", same_ids=True)
            assert replay.replay(named, load_settings(database_url=self.outbox.url), total=ROWS).added == ROWS
        self.outbox.rows("DELETE FROM durable.incoming_envelopes")

    def replay(self, side: str, address: str, service: str | None, *options: str, by_code: bool = True) -> Ended:
        """Replay the messages under the same ids, as history of this service has them."""
        self.files += 1
        place = str(self.folder / f"files {self.files}")
        whose = "CAST(NULL AS STRING)" if service is None else f"'{service}'"
        history(self.spark, ROWS, id=IDS, side=f"'{side}'", address=f"'{address}'", service=whose).write.parquet(place)
        target = (self.bus,) if by_code else ("--database", self.outbox.url)
        command = ("pipeline", "replay", *target, "--json", "--name", f"{self.files}", "--parquet", place, "--all")
        return self.agent(*command, "--same-ids", *options)

    @property
    def arrived(self) -> list[Known]:
        """What has come in, and what comes in at the listener once it is sent."""
        at_listener = self.outbox.rows(
            "SELECT id::text, %s FROM durable.outgoing_envelopes WHERE destination = ANY(%s)", HERE, list(OWN)
        )
        came_in = self.outbox.rows("SELECT id::text, endpoint FROM durable.incoming_envelopes")
        return [Known(*row) for row in (*came_in, *at_listener)]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def service(spark: SparkSession, agent: Agent, emptied_url: str, tmp_path: Path) -> Service:
    return Service(spark, agent, emptied_url, tmp_path)


@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("whose", WHOSE)
def test_handled_message_is_not_handled_again_under_its_id(
    service: Service, whose: str, side: str, destination: str
) -> None:
    service.be_known()
    of, address = SIDES[side]
    endpoint = address if of == "incoming" else HERE
    service.handle(endpoint)
    to = DESTINATIONS[destination]
    ended = service.replay(of, address, WHOSE[whose], *(() if to is None else ("--destination", to)))
    arrived = {Known(each.id, each.endpoint) for each in service.arrived}
    assert {each.endpoint for each in arrived} <= {endpoint}, "it came in where nobody knows it"
    if (whose, side, destination) in ACCEPTED:
        assert ended.code == 0, ended.err
        waiting = service.outbox.rows("SELECT destination FROM durable.outgoing_envelopes")
        assert waiting == ([(to or address,)] * ROWS if of == "outgoing" else [])
        assert service.outbox.inbox == [], "it is known where it came in"
    else:
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
        assert f"same_ids: {ROWS} of these messages " in ended.err
        assert "replay them under new ids" in ended.err
        assert (service.arrived, service.outbox.orders) == ([], [])


@pytest.mark.parametrize("side", SIDES)
def test_lost_message_comes_back_to_its_endpoint(service: Service, side: str) -> None:
    service.be_known()
    of, address = SIDES[side]
    ended = service.replay(of, address, HERE, *(("--destination", LOCAL) if of == "incoming" else ()))
    assert json.loads(ended.out)["added"] == ROWS, ended.err
    assert {each.endpoint for each in service.arrived} == LOST[side]


@pytest.mark.parametrize("by_code", [False, True], ids=["of a database", "of a bus"])
@pytest.mark.parametrize("side", SIDES)
def test_incoming_message_is_refused_when_the_service_is_unknown(service: Service, side: str, by_code: bool) -> None:
    of, address = SIDES[side]
    ended = service.replay(of, address, OTHER, by_code=by_code)
    if of == "outgoing" and not by_code:
        assert ended.code == 0, ended.err
        return
    assert ended.code == 2
    told = "replay them with the database of sb" if by_code else "the service of this database is unknown; give APP:BUS"
    assert told in ended.err
    assert (service.arrived, service.outbox.orders) == ([], [])


def test_message_without_a_service_counts_as_an_own_one(service: Service) -> None:
    service.be_known()
    service.handle(HERE)
    assert json.loads(service.replay("incoming", HERE, None).out)["added"] == 0
