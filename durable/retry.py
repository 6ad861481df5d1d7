"""What becomes of a message whose handler failed: a rule from a policy, the attempts so far and the error.

    failed --immediate attempts left--> RunAgain          in this process, in a fresh session
           --delays left-------------> RunLater(delay)    a row with an execution time; no memory, no slot
           --otherwise---------------> DeadLetter

A handler's own verdict (Reject, RetryLater, Release) comes before the policy, and so does InvalidMessage: a message
that cannot be decoded today is not going to be decodable in a minute.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from durable.errors import InvalidMessage, InvalidSetting, Reject, Release, RetryLater


@dataclass(frozen=True, slots=True)
class RunAgain:
    """At once, in this process."""


@dataclass(frozen=True, slots=True)
class RunLater:
    """After `delay`, by whichever node is free then."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class HandBack:
    """Unowned and uncounted, for any node."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """For people to look at."""


Decision = RunAgain | RunLater | HandBack | DeadLetter


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and when a failed message runs again.

    `immediate` more attempts at once in the same process, then one after each of `delays` (seconds or timedeltas,
    each varied by up to `jitter` so that failures do not come back all together), then the dead letters.
    """

    immediate: int = 2
    delays: Sequence[float | timedelta] = (1, 10, 60)
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if self.immediate < 0 or any(_seconds(delay) < 0 for delay in self.delays):
            raise InvalidSetting("Retry: immediate and delays must not be negative")
        if not 0 <= self.jitter < 1:
            raise InvalidSetting("Retry: jitter must be at least 0 and below 1")

    @property
    def max_attempts(self) -> int:
        return 1 + self.immediate + len(self.delays)

    def decide(self, error: BaseException, attempt: int, rng: random.Random | None = None) -> Decision:
        """What to do after this failed attempt; `attempt` counts from 1."""
        match error:
            case RetryLater(after=after):
                return RunLater(after)
            case Release():
                return HandBack()
            case Reject() | InvalidMessage():
                return DeadLetter()
            case _:
                return self._next(attempt, rng or random.Random())

    def _next(self, attempt: int, rng: random.Random) -> Decision:
        if attempt <= self.immediate:
            return RunAgain()
        if attempt < self.max_attempts:
            return RunLater(self._varied(self.delays[attempt - self.immediate - 1], rng))
        return DeadLetter()

    def _varied(self, delay: float | timedelta, rng: random.Random) -> timedelta:
        return timedelta(seconds=_seconds(delay) * rng.uniform(1 - self.jitter, 1 + self.jitter))

    @property
    def horizon(self) -> timedelta:
        """The longest a message may go on being retried: less than the time for which duplicates are recognised."""
        return timedelta(seconds=sum(_seconds(delay) for delay in self.delays) * (1 + self.jitter))


def _seconds(delay: float | timedelta) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else delay
