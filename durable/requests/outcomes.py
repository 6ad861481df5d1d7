"""Outcomes and answers, as transports tell them to clients that have only an id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from durable.encryption.ring import KeyRing
from durable.envelope import Envelope
from durable.errors import NoAnswer, StillWaiting
from durable.messages.routing import LOCAL
from durable.requests.watch import Watch
from durable.storage import answers
from durable.storage.database import Database

_ONE_LOOK: Final = timedelta(0)


class Outcomes:
    """Receipts and answers of one service. Its methods raise UnknownMessage and StorageUnavailable."""

    def __init__(self, watch: Watch, database: Callable[[], Database], ring: KeyRing) -> None:
        self._watch = watch
        self._database = database
        self._ring = ring

    async def outcome(self, message_id: UUID, at: str | None, patience: timedelta) -> Mapping[str, Any] | None:
        """Return the receipt of a message; None while it waits, after so much patience."""
        try:
            return (await self._watch.wait(message_id, patience, at=at)).shown()
        except StillWaiting:
            return None

    async def answer(self, request_id: UUID, patience: timedelta) -> Envelope | None:
        """Return the answer of this service itself, decrypted; None while there is none.

        Raises NoAnswer, MissingKey and Forged.
        """
        try:
            return self._ring.opened(await self._watch.answer(request_id, patience, from_here=True))
        except StillWaiting:
            return None

    async def begin(self, request_id: UUID, at: str) -> None:
        """Forget the answer to a former request, whose id is known at this endpoint no more."""
        await self._database().statement(answers.forget_former, request_id, endpoint=LOCAL, came_to=at)

    async def forget(self, request_id: UUID) -> None:
        """Forget the answer to a request, also one that is to come, and one that cannot be opened."""
        with suppress(NoAnswer, StillWaiting):
            await self._watch.answer(request_id, _ONE_LOOK, from_here=True)
        await self._database().transaction(answers.forget, request_id, endpoint=LOCAL)
