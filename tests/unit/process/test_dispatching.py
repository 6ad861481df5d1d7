"""What is told to agents after a COMMIT."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from durable.clock import SystemClock
from durable.envelope import NodeId
from durable.messages.routing import LOCAL
from durable.process.dispatching import AgentsDispatcher
from durable.settings import load_settings
from durable.storage.outbox import Sent


class _WithoutLoop:
    """A node whose event loop is closed amid the commit."""

    agents = cast(Any, type("Agents", (), {"deliver": None}))

    def in_loop(self, *_: object) -> None:
        raise RuntimeError("Event loop is closed")


def test_commit_does_not_fail_when_its_agents_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    node = cast(Any, _WithoutLoop())
    dispatcher = AgentsDispatcher(lambda: node, cast(Any, None), SystemClock(), load_settings())
    sent = [Sent(cast(Any, None), LOCAL, NodeId(1))]

    dispatcher.committed(sent)
    dispatcher.committed(sent)

    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.ERROR]
