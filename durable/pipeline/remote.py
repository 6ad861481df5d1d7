"""Patience of a session with a Spark Connect server that does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import grpc
from pyspark.sql.connect.client.retries import DefaultPolicy

from durable.errors import DurableError

PATIENCE_SECONDS: Final = 60
_SEPARATE_SECONDS = 30  # failures that lie further apart are of two outages
_LONGEST_PAUSE_SECONDS = 5


class Patience(DefaultPolicy):
    """Tries again while a server is away for a minute, counted over all calls; Spark's own policy takes ten for each.

    Raises DurableError, which names the server, from the call that has waited long enough, and from later ones.
    """

    def __init__(self, server: str, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            max_retries=None, initial_backoff=100, backoff_multiplier=2.0, max_backoff=_LONGEST_PAUSE_SECONDS * 1_000
        )
        self._server, self._now = server, now
        self._first = self._last = -float("inf")

    def can_retry(self, e: BaseException) -> bool:
        if not super().can_retry(e):
            return False
        now = self._now()
        if now - self._last > _SEPARATE_SECONDS:
            self._first = now
        self._last = now
        if isinstance(e, grpc.RpcError) and now - self._first >= PATIENCE_SECONDS:
            raise DurableError(
                f"the Spark Connect server at {self._server} has not answered for {PATIENCE_SECONDS} seconds; look "
                "into its log, start it again, and run the same again"
            ) from None
        return True
