"""Contract of transports, as tests: the suite that durable's own transports run, for those of others too.

    class TestPigeons(DirectContract):
        impossible_uris = ("pigeon://",)

        @pytest_asyncio.fixture
        async def link(self) -> AsyncIterator[Link]:
            async with Link(PigeonTransport, "pigeon://127.0.0.1:0") as link:
                yield link

There are two natures of transports, and a contract for each:

    DirectContract      the outcome comes from the receiver itself, which has committed: TCP, HTTP, memory
    BrokeredContract    the outcome comes from a broker, which keeps the envelope for the receiver: RabbitMQ

What both must do is in TransportContract. The suite needs pytest and pytest-asyncio; nothing else of durable does.
docs/transports.md has a whole transport and its tests.
"""

import pytest

for _module in ("contract", "direct", "brokered"):  # so that a failing assert shows its values, as in a test module
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from durable.testing.transports.brokered import BrokeredContract  # noqa: E402
from durable.testing.transports.contract import TransportContract  # noqa: E402
from durable.testing.transports.direct import DirectContract  # noqa: E402
from durable.testing.transports.link import HASTY, PATIENT, Link, Way, error_of  # noqa: E402
from durable.testing.transports.proxy import DOWN, UP, ChaosProxy, Direction  # noqa: E402
from durable.testing.transports.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes  # noqa: E402

__all__ = [
    "DOWN",
    "HASTY",
    "PATIENT",
    "REJECTED_TYPE",
    "UP",
    "BrokeredContract",
    "ChaosProxy",
    "DirectContract",
    "Direction",
    "Link",
    "MemoryReceiver",
    "TransportContract",
    "Way",
    "envelope",
    "envelopes",
    "error_of",
]
