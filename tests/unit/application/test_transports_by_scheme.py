"""The transports of a process, by the schemes of addresses."""

from __future__ import annotations

import pytest

from durable import Bus, InvalidSetting


@pytest.mark.parametrize("first", ["tcp://127.0.0.1:2302", "http://127.0.0.1:2302"])
def test_unknown_scheme_names_the_known_ones_in_one_order(first: str) -> None:
    bus = Bus("shop")
    bus.listen(first)
    with pytest.raises(InvalidSetting, match=r"known: http://, https://, rabbitmq://, tcp://, unix://$"):
        bus.listen("carrier-pigeon://roof")
