"""The transports of a process, by the schemes of addresses."""

from __future__ import annotations

import pytest

from durable import Bus, InvalidSetting
from durable.messages.reply_to import Answers
from durable.settings import Settings


@pytest.mark.parametrize("first", ["tcp://127.0.0.1:2302", "http://127.0.0.1:2302"])
def test_unknown_scheme_names_the_known_ones_in_one_order(first: str) -> None:
    bus = Bus("shop")
    bus.listen(first)
    with pytest.raises(InvalidSetting, match=r"known: http://, https://, rabbitmq://, tcp://, unix://$"):
        bus.listen("carrier-pigeon://roof")


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("TCP://127.0.0.1:2302", "tcp://127.0.0.1:2302"),
        ("Unix:///A.sock", "unix:///A.sock"),
        ("HTTP://127.0.0.1:2302/A", "http://127.0.0.1:2302/A"),
        ("RABBITMQ://default/queue/A", "rabbitmq://default/queue/A"),
    ],
)
def test_scheme_is_taken_in_capitals_and_kept_in_small_letters(written: str, stored: str) -> None:
    bus = Bus("shop", amqp_url="amqp://a:b@127.0.0.1:1/c")
    bus.listen(written)
    assert bus.runtime.transports.resolve(written, "a.b") == stored
    with pytest.raises(InvalidSetting, match="the bus has this listener already"):
        bus.listen(stored)


@pytest.mark.parametrize("allowed", ["TCP://a:1", "tcp://a:1"])
@pytest.mark.parametrize("asked", ["TCP://a:1", "tcp://a:1"])
def test_answers_go_to_an_allowed_address_however_its_scheme_is_written(allowed: str, asked: str) -> None:
    assert Answers(Settings(answer_to=(allowed,))).may_go(asked, ())


def test_bearer_secret_is_kept_from_an_address_when_its_scheme_is_in_capitals() -> None:
    settings = Settings(answer_to=("http://a/*",), http_auth="bearer", shared_secret="s" * 32)  # type: ignore[arg-type]
    assert not Answers(settings).may_go("HTTP://a/b", ())


@pytest.mark.parametrize("name", ["", "x" * 101, "a\nb"])
def test_refused_name_of_a_listener_is_told_the_limit(name: str) -> None:
    with pytest.raises(InvalidSetting, match="give 1 to 100 characters of printable text"):
        Bus("shop").listen("tcp://127.0.0.1:2302", name=name)
