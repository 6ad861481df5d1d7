"""Where answers may go."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import InvalidSetting
from durable.messages.reply_to import Answers
from durable.settings import load_settings

SECRET = "0123456789abcdef"
BEARER = {"http_auth": "bearer", "shared_secret": SECRET}
PEER = "https://partner.example/durable"


@pytest.mark.parametrize(
    ("address", "settings", "allowed"),
    [
        (PEER, {}, False),
        ("tcp://127.0.0.1:2301", {}, False),
        ("tcp://declared:1", {}, True),
        (PEER, {"answer_to": (PEER,)}, True),
        (PEER + "/more", {"answer_to": (PEER,)}, False),
        (PEER, {"answer_to": ("https://partner.example/*",)}, True),
        ("https://partner.example.evil/durable", {"answer_to": ("https://partner.example/*",)}, False),
        ("tcp://127.0.0.1:2301", {"answer_to": ("tcp://*",)}, True),
        (PEER, {"answer_to": ("tcp://*",)}, False),
        (PEER, {"answer_to": ("*",)}, True),
        (PEER, {"answer_to": ("*",), **BEARER}, False),
        (PEER.replace("https", "HTTPS"), {"answer_to": ("*",), **BEARER}, False),
        (PEER, {"answer_to": ("https://partner.example/*",), **BEARER}, False),
        (PEER, {"answer_to": (PEER,), **BEARER}, True),
        ("tcp://127.0.0.1:2301", {"answer_to": ("*",), **BEARER}, True),
        (PEER, {"answer_to": ("*",), "http_auth": "bearer"}, True),
    ],
)
def test_answer_goes_only_to_declared_or_allowed_addresses(
    address: str, settings: dict[str, Any], allowed: bool
) -> None:
    assert Answers(load_settings(**settings)).may_go(address, {"tcp://declared:1"}) is allowed


@pytest.mark.parametrize("wrong", ["https://partner.example*", "https://*/durable", "tcp://*:2301/*", "**"])
def test_pattern_with_an_ambiguous_wildcard_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match="a \\* stands alone, or at the end behind a slash"):
        load_settings(answer_to=(wrong,))


@pytest.mark.parametrize("settings", [{}, BEARER], ids=["hmac", "bearer"])
@pytest.mark.parametrize(
    "address",
    [
        " http://evil:80/x",
        "\nhttp://evil:80/x",
        "\x01http://evil:80/x",
        "ht\ttp://evil:80/x",
        "http:\n//evil:80/x",
        "\xa0http://evil:80/x",
        "\u2003http://evil:80/x",
        "http://evil:80/x ",
        "http://evil\x7f:80/x",
        "tcp://evil :1",
    ],
)
def test_address_with_an_ambiguous_reading_is_refused(address: str, settings: dict[str, Any]) -> None:
    assert not Answers(load_settings(answer_to=("*",), **settings)).may_go(address, {"tcp://declared:1"})


def test_pattern_allows_no_address_with_control_characters() -> None:
    allowed = Answers(load_settings(answer_to=("http://good:80/*",)))
    assert allowed.may_go("http://good:80/x", ())
    assert not allowed.may_go("http://good:80/\t@evil/x", ())
