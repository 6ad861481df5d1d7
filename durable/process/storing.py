"""A process without a node, which only stores arrivals, for the nodes of the service's other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from durable.agents.context import AgentContext
from durable.agents.intake import LeftToOthers
from durable.agents.receiving import ReceivingAgent
from durable.application.application import Application
from durable.tasks.crew import contained, end
from durable.telemetry import log

_AGAIN_SECONDS: Final = 0.5


class Storing:
    """Receiving agent of the process; another one is started whenever an agent fails."""

    def __init__(self, application: Application, context: Callable[[], AgentContext]) -> None:
        self.receiver: ReceivingAgent | None = None
        self._application = application
        self._context = context
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.receiver = self._make()
        self._task = asyncio.create_task(self._run(self.receiver), name=f"durable {self._application.service}")

    async def stop(self, drain_seconds: float, ending_seconds: float) -> None:
        """Let the agent drain; then end it."""
        if self._task is not None and self.receiver is not None:
            self.receiver.stop()
            await asyncio.wait([self._task], timeout=drain_seconds)
            await end([self._task], within=ending_seconds)

    async def _run(self, receiver: ReceivingAgent) -> None:
        while True:
            try:
                await contained(receiver.run())
                return
            except Exception:
                log.exception("storing what arrives broke off, and begins again")
                self.receiver = receiver = self._make()
                await asyncio.sleep(_AGAIN_SECONDS)

    def _make(self) -> ReceivingAgent:
        application = self._application
        places, spans = application.routes.places, application.batch_spans
        return ReceivingAgent(self._context(), LeftToOthers(), places=places, spans=spans)
