"""Addresses to send to: what no service could reach is refused alike by publishing, by replays and by the bus."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from durable import Bus, message
from durable.errors import DurableError, InvalidSetting
from durable.pipeline import replay
from durable.pipeline.publishable import whole
from durable.pipeline.screens import Limits, flaw
from durable.transports.addresses import canonical

NOW = datetime.now(UTC)
LIMITS = Limits(1_000, timedelta(days=7), timedelta(days=1))
MALFORMED = (
    *("", "x", "://x", "tcp:b:1", "tpc://127.0.0.1:1", "local ", "LOCAL", "9p://x", "a b://x"),
    *("tcp://", "tcp://b", "tcp://b:99999", "tcp://b:0", "tcp://127.0.0.1:0", "tcp://b:1/../x", "tcp://b:x"),
    *("tcp://:1", "tcp://u@b:1", "tcp://b:1#x", "tcp://b:1?x=1", "tcp://a b:1", "tcp://[::1", "tcp://-:1"),
    *("unix://", "unix://x", "unix:///", "unix:///x/", "unix:///x?y=1", "unix:///" + "x" * 200),
    *("http://", "http://b:0", "http://127.0.0.1:0", "http://b:99999", "http://b:x", "http://b/../x", "http://b//x"),
    *("http://u@b", "http://b#x", "http://b?x=1", "http://a b", "https://", "https://b:0", "https:///x"),
    *("rabbitmq://", "rabbitmq://default", "rabbitmq://default/", "rabbitmq:///queue/x", "rabbitmq://default/queue/"),
    *("rabbitmq://default/quue/x", "rabbitmq://u:p@default/queue/x", "rabbitmq://default/queue/ü"),
    *("rabbitmq://default/queue/x#y", "rabbitmq://default/queue/x?y=1", "rabbitmq://default/topic/orders"),
    *("memory://", "memory://x/y", "memory://x?y=1", "memory://[x"),
)
UNRESOLVED = ("rabbitmq://x/topic", "rabbitmq://default/topic")
"""Addresses that the bus resolves to others, for each type."""
FOR_THE_SERVICE_TO_JUDGE = ("tcp://billing:2301", "rabbitmq://other/queue/x", "lines:///x", "memory://orders")
SOUND = (
    *("tcp://127.0.0.1:2301", "tcp://[::1]:65535", "unix:///run/orders.sock", "http://127.0.0.1:8001", "https://b/x"),
    *("rabbitmq://default/queue/mail", "rabbitmq://default/exchange/mail/a.b", "rabbitmq://default/exchange/mail/"),
)


@message("addresses.sent")
class Sent(msgspec.Struct):
    pass


@pytest.fixture
def bus() -> Bus:
    return Bus("shop", database="postgresql://127.0.0.1:1/none", amqp_url="amqp://a:b@127.0.0.1:1/c")


def published(destination: str) -> str | None:
    """The flaw of a row with this destination."""
    texts = {"message_type": "addresses.sent", "source": "shop", "destination": destination}
    columns = {name: pa.array([text], pa.string()) for name, text in texts.items()}
    columns |= {name: pa.array([value], pa.binary()) for name, value in {"id": UUID(int=1).bytes, "body": b""}.items()}
    return flaw(whole(pa.RecordBatch.from_pydict(columns), NOW), LIMITS, NOW)


@pytest.mark.parametrize("uri", [*MALFORMED, *UNRESOLVED])
def test_malformed_destination_is_refused_by_publishing_and_replays(uri: str) -> None:
    found = published(uri)
    assert found is not None
    assert "destination" in found
    with pytest.raises(InvalidSetting) as refused:
        replay.messages(None, name="x", destination=uri)  # type: ignore[arg-type]  # no row is looked at
    assert uri == "" or str(refused.value) in found, "one parser, and one error"


@pytest.mark.parametrize("uri", MALFORMED)
def test_malformed_destination_is_refused_by_the_bus(bus: Bus, uri: str) -> None:
    with pytest.raises(InvalidSetting):
        bus.route(Sent, to=uri)


@pytest.mark.parametrize("uri", [*SOUND, *FOR_THE_SERVICE_TO_JUDGE])
def test_well_formed_destination_is_published(uri: str) -> None:
    canonical(uri)
    assert published(uri) is None


@pytest.mark.parametrize("uri", SOUND)
def test_well_formed_destination_is_routed_by_the_bus(bus: Bus, uri: str) -> None:
    bus.route(Sent, to=uri)


@pytest.mark.parametrize("uri", UNRESOLVED[1:])
def test_topic_can_be_published_to_in_its_resolved_form(bus: Bus, uri: str) -> None:
    canonical(bus.runtime.transports.resolve(uri, "addresses.sent"))


@pytest.mark.parametrize(
    ("written", "destination"),
    [
        ("tcp://127.0.0.1:2711?reuse_port=1", "tcp://127.0.0.1:2711"),
        ("tcp://Orders.Example:02711?tls=1", "tcp://orders.example:2711?tls=1"),
        ("tcp://[::1]:2711?reuse_port=1", "tcp://[::1]:2711"),
        ("http://127.0.0.1:8001?reuse_port=1", "http://127.0.0.1:8001"),
        ("https://Orders.Example:08001/in/", "https://orders.example:8001/in"),
        ("unix:///run/orders.sock", "unix:///run/orders.sock"),
    ],
)
def test_every_form_of_an_address_resolves_to_one_destination(bus: Bus, written: str, destination: str) -> None:
    resolve = bus.runtime.transports.resolve
    assert [resolve(uri, "addresses.sent") for uri in (written, destination)] == [destination, destination]


SCHEMES = ("tcp", "unix", "http", "https", "rabbitmq", "memory", "local", "lines", "9p", "")
PARTS = st.one_of(
    st.text(st.characters(), max_size=12),
    st.sampled_from(["\n", "\r\n", "\ud800", "\x1b[2J", "\u202e", "\x00", "\t", "\u2028", *SOUND, *MALFORMED]),
)
TEXTS = st.builds("".join, st.lists(PARTS, max_size=4))
ADDRESSES = st.one_of(TEXTS, st.builds("{}://{}".format, st.sampled_from(SCHEMES), TEXTS))


def error_of(use: Callable[[], object]) -> str:
    """The text of the error that this raises; empty when it raises none."""
    try:
        use()
    except DurableError as error:
        return str(error)
    return ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(uri=ADDRESSES)
@example("tcp://127.0.0.1:1\n")
@example("tcp://\ud800")
@example("lines\n://x")
@example("tcp://127.0.0.1:1\nERROR forged")
def test_error_with_an_address_is_one_printable_line(bus: Bus, uri: str) -> None:
    transports = bus.runtime.transports
    for use in (
        canonical,
        transports.of,
        lambda each: transports.resolve(each, "addresses.sent"),
        lambda each: bus.route(Sent, to=each),
        lambda each: bus.subscribe(Sent, to=each),
        lambda each: Bus("shop", database="postgresql://127.0.0.1:1/none").listen(each),
    ):
        assert error_of(partial(use, uri)).isprintable()
