"""What becomes of a message whose handler failed: a rule from a policy, the error, the attempts so far and its age.

    failed --immediate attempts left--> RunAgain          in this process, in a fresh session
           --delays left-------------> RunLater(delay)    a row with an execution time; no memory, no slot
           --otherwise---------------> DeadLetter

A handler's own verdict (Reject, RetryLater, Release, PauseListener) comes before the policy, and so does
InvalidMessage: a message that cannot be decoded today is not going to be decodable in a minute. Then the nearest class
of the error counts: the handler's own rule for it, else the service's, else the handler's `retry`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Self

from durable.errors import InvalidMessage, InvalidSetting, PauseListener, Reject, Release, RetryLater


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
class Pause:
    """Unowned and uncounted, and nobody takes any more of them for this time."""

    duration: timedelta
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """For people to look at."""


Decision = RunAgain | RunLater | HandBack | Pause | DeadLetter


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and when a failed message runs again.

    `immediate` more attempts at once in the same process, then one after each of `delays` (seconds or timedeltas,
    each varied by up to `jitter` so that failures do not come back all together), then the dead letters. With
    `max_age` (a timedelta or seconds) none of them runs when the message was sent longer ago than that.
    """

    immediate: int = 2
    delays: Sequence[float | timedelta] = (1, 10, 60)
    jitter: float = 0.1
    max_age: float | timedelta | None = None

    @classmethod
    def never(cls) -> Self:
        """The first failure is the last."""
        return cls(immediate=0, delays=())

    def __post_init__(self) -> None:
        if self.immediate < 0 or any(_seconds(delay) < 0 for delay in self.delays):
            raise InvalidSetting("Retry: immediate and delays must not be negative")
        if self.max_age is not None and _seconds(self.max_age) <= 0:
            raise InvalidSetting("Retry: max_age must be above 0")
        if not 0 <= self.jitter < 1:
            raise InvalidSetting("Retry: jitter must be at least 0 and below 1")

    @property
    def max_attempts(self) -> int:
        return 1 + self.immediate + len(self.delays)

    def next(self, attempt: int, age: timedelta, rng: random.Random) -> Decision:
        """What to do after this failed attempt of a message of this age."""
        decision = self._next(attempt, rng)
        wait = decision.delay if isinstance(decision, RunLater) else timedelta(0)
        if self.max_age is not None and (age + wait).total_seconds() > _seconds(self.max_age):
            return DeadLetter()
        return decision

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


ByError = Mapping[type[Exception], Retry]


@dataclass(frozen=True, slots=True)
class Policy:
    """What the failures of one handler lead to."""

    retry: Retry = field(default_factory=Retry)
    by_error: ByError = field(default_factory=dict)

    def decide(
        self, error: BaseException, attempt: int, age: timedelta = timedelta(0), rng: random.Random | None = None
    ) -> Decision:
        """What to do after this failed attempt; `attempt` counts from 1, `age` from when the message was sent."""
        match error:
            case RetryLater(after=after):
                return RunLater(after)
            case Release():
                return HandBack()
            case PauseListener(for_=duration):
                return Pause(duration, str(error))
            case Reject() | InvalidMessage():
                return DeadLetter()
            case _:
                return self._of(error).next(attempt, age, rng or random.Random())

    def _of(self, error: BaseException) -> Retry:
        nearest = next((cls for cls in type(error).__mro__ if cls in self.by_error), None)
        return self.retry if nearest is None else self.by_error[nearest]

    @property
    def max_attempts(self) -> int:
        return max(retry.max_attempts for retry in self._all)

    @property
    def horizon(self) -> timedelta:
        """The longest that any of its rules may go on."""
        return max(retry.horizon for retry in self._all)

    def steady(self) -> Self:
        """The same without jitter."""
        by_error = {error: replace(retry, jitter=0) for error, retry in self.by_error.items()}
        return replace(self, retry=replace(self.retry, jitter=0), by_error=by_error)

    @property
    def _all(self) -> list[Retry]:
        return [self.retry, *self.by_error.values()]


def _seconds(delay: float | timedelta) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else delay
