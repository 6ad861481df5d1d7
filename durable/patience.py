"""Waiting for the database to come back: an agent that has something to write never gives it up."""

from __future__ import annotations

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter
from tenacity import RetryCallState as Attempt

from durable.errors import StorageUnavailable
from durable.telemetry import log


def patiently(doing: str) -> AsyncRetrying:
    """Retry on StorageUnavailable for ever, 0.1 s to 5 s apart. Every statement it is used for may run twice.

    async for attempt in patiently("delete sent envelopes"):
        with attempt:
            await database.transaction(...)
    """

    def tell(attempt: Attempt) -> None:
        error = attempt.outcome.exception() if attempt.outcome else None
        log.warning("storage unavailable: %s, attempt %d: %s", doing, attempt.attempt_number, error)

    return AsyncRetrying(
        retry=retry_if_exception_type(StorageUnavailable),
        wait=wait_exponential_jitter(multiplier=0.1, max=5, jitter=0.1),
        before_sleep=tell,
    )
