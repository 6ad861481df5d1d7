"""Retry policies: the decision about a failed message, from the error, the attempts so far and its age.

    failed --immediate attempts left--> RunAgain          in this process, in a fresh session
           --delays left-------------> RunLater(delay)    a row with an execution time; no memory, no slot
           --otherwise---------------> DeadLetter
           or, by a RetryAfter-------> Pause              the handler, on every node, for as long as the error asks for

A handler's own verdict (Reject, RetryLater, Release, PutBack, PauseListener) comes before the policy, and so do
InvalidMessage and WiringError: a message that cannot be decoded today is not going to be decodable in a minute, and no
route is going to be declared by then. Then the nearest class of the error counts: the handler's own rule for it, else
the service's, else the handler's `retry`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Annotated, Final, Self

from durable.arguments import checked_class
from durable.duration import Duration, duration, time_from_now
from durable.errors import (
    InvalidMessage,
    InvalidSetting,
    PauseListener,
    PutBack,
    Reject,
    Release,
    RetryLater,
    Verdict,
    WiringError,
    leaves_of,
    said,
    text_of,
)

_SHORTEST_PAUSE: Final = timedelta(seconds=1)
_MOST_IMMEDIATE: Final = 1_000_000

for _verdict in (Reject, RetryLater, Release, PutBack, PauseListener):  # defined where nothing can be checked yet
    checked_class(_verdict)


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Another attempt at once, in this process."""


@dataclass(frozen=True, slots=True)
class RunLater:
    """Another attempt after `delay`, by any node that is free then."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class HandBack:
    """Unowned and uncounted, for any node."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Verdict to hand the message back unowned, and to stop its handler for this time."""

    time: timedelta
    reason: str
    listener: bool = False
    """True if the listener of the message is paused as well."""
    counts: bool = False
    """True if the attempt is counted; the message is handed back uncounted otherwise."""


@dataclass(frozen=True, slots=True)
class ToTheEnd:
    """Unowned and counted, behind all that waits, with these headers; None removes one."""

    headers: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Put the message aside for operators."""


Decision = RunAgain | RunLater | HandBack | ToTheEnd | Pause | DeadLetter


@checked_class
@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy: how often and when a failed message runs again.

    `immediate` more attempts at once in the same process, then one after each of `delays` (seconds, "10s" or
    timedeltas, each varied by up to `jitter` so that failures do not come back all together), then the dead letters.
    With `max_age` (seconds, "1h" or a timedelta) none of them runs when the message was sent longer ago than that, by
    the clock of the database; one with a delay is as old as it is overdue.
    """

    immediate: int = 2
    delays: Sequence[Duration] = (1, 10, 60)
    jitter: float = 0.1
    max_age: Duration | None = None

    @classmethod
    def never(cls) -> Self:
        """The first failure is the last."""
        return cls(immediate=0, delays=())

    def __post_init__(self) -> None:
        if not 0 <= self.immediate <= _MOST_IMMEDIATE:
            raise InvalidSetting(f"Retry: immediate={self.immediate}: give 0 to {_MOST_IMMEDIATE:,}")
        for delay in self.delays:
            _wait("Retry: delays", delay)
        if self.max_age is not None and duration(self.max_age) <= timedelta(0):
            raise InvalidSetting("Retry: max_age must be above 0")
        if not 0 <= self.jitter < 1:
            raise InvalidSetting("Retry: jitter must be at least 0 and below 1")

    @property
    def max_attempts(self) -> int:
        """The number of times that a message is tried before it becomes a dead letter."""
        return 1 + self.immediate + len(self.delays)

    def next(self, attempt: int, age: timedelta, rng: random.Random) -> Decision:
        """Return the decision after a failed attempt of a message of this age."""
        decision = self._next(attempt, rng)
        wait = decision.delay if isinstance(decision, RunLater) else timedelta(0)
        if self.max_age is not None and age + wait > duration(self.max_age):
            return DeadLetter()
        return decision

    def _next(self, attempt: int, rng: random.Random) -> Decision:
        if attempt <= self.immediate:
            return RunAgain()
        if attempt < self.max_attempts:
            return RunLater(self._varied(self.delays[attempt - self.immediate - 1], rng))
        return DeadLetter()

    def _varied(self, delay: Duration, rng: random.Random) -> timedelta:
        return duration(delay) * rng.uniform(1 - self.jitter, 1 + self.jitter)

    @property
    def horizon(self) -> timedelta:
        """The longest a message may go on being retried: less than the time for which duplicates are recognised."""
        return sum(map(duration, self.delays), timedelta(0)) * (1 + self.jitter)


RetryPolicy = Annotated[Retry, "a Retry, such as Retry(delays=[1, '10s'])"]
"""A Retry, with an example for those who give something else."""


@checked_class
@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Policy of errors that say how long their handler must wait: until then no node runs it.

    The time is the error's `retry_after` (a timedelta or seconds), or the Retry-After header of its `response`, as
    httpx and requests raise it (RFC 9110, 10.2.3), else `default`; at least `shortest` and at most `longest`. The
    message is handed back uncounted. An error that asks for less than `shortest`, such as `Retry-After: 0`, counts as
    an attempt: no limit ends then, and the message must come to its end.
    """

    default: Duration = 30
    longest: Duration = 3600
    shortest: Duration = 1

    def __post_init__(self) -> None:
        times = (self.default, self.longest, self.shortest)
        if min(map(duration, times)) <= timedelta(0):
            raise InvalidSetting("RetryAfter: default, longest and shortest must be above 0")
        _, longest, shortest = (_wait("RetryAfter", each) for each in times)
        if shortest > longest:
            raise InvalidSetting(f"RetryAfter: shortest={self.shortest!r} is more than longest={self.longest!r}")

    def pause(self, error: BaseException) -> Pause:
        """Return for how long to pause, and whether the attempt counts."""
        asked = _asked_for(error)
        wanted, shortest = duration(self.default) if asked is None else asked, duration(self.shortest)
        time = min(max(wanted, shortest), max(duration(self.longest), shortest))
        return Pause(time, said(error), counts=asked is not None and wanted < shortest)


def _wait(of: str, value: Duration) -> timedelta:
    try:
        return time_from_now(value)
    except ValueError as error:
        raise InvalidSetting(f"{of}: {error}") from None


def _seconds(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _asked_for(error: BaseException) -> timedelta | None:
    try:
        asked = getattr(error, "retry_after", None)
        if isinstance(asked, timedelta | int | float):
            return duration(asked)
        return _retry_after(getattr(getattr(error, "response", None), "headers", {}))
    except BaseException:  # properties of a class of the application, or a number that is no time
        return None


def _retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """Read the peer's delay: seconds, or a date by the peer's own clock, which another header shows."""
    value = headers.get("retry-after") or headers.get("Retry-After") or ""
    try:
        if value.strip().isdigit():
            return timedelta(seconds=int(value))
        now = headers.get("date") or headers.get("Date") or ""
        return parsedate_to_datetime(value) - parsedate_to_datetime(now)
    except (TypeError, ValueError, OverflowError):
        return None


ByError = Mapping[type[Exception], Retry | RetryAfter]


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy for the failures of one handler."""

    retry: Retry = field(default_factory=Retry)
    by_error: ByError = field(default_factory=dict)

    def decide(
        self, error: BaseException, attempt: int, age: timedelta = timedelta(0), rng: random.Random | None = None
    ) -> Decision:
        """Return the decision after a failed attempt; `attempt` counts from 1, `age` from when the message was due."""
        match error:
            case RetryLater(after=after):
                return RunLater(after)
            case Release():
                return HandBack()
            case PutBack(headers=headers):
                return ToTheEnd(headers)
            case PauseListener(for_=time):
                return Pause(max(time, _SHORTEST_PAUSE), text_of(error), listener=True)
            case Reject() | InvalidMessage() | WiringError():
                return DeadLetter()
            case _:
                return self._by_rule(error, attempt, age, rng)

    def _by_rule(self, error: BaseException, attempt: int, age: timedelta, rng: random.Random | None) -> Decision:
        met, rule = self._met(error)
        match rule:
            case RetryAfter():
                pause = rule.pause(met)
                return DeadLetter() if pause.counts and attempt >= self.max_attempts else pause
            case Retry():
                return rule.next(attempt, age, rng or random.Random())

    def _met(self, error: BaseException) -> tuple[BaseException, Retry | RetryAfter]:
        """Return the error that a rule is for, and the rule: of a group, the first that has one of its own."""
        for each in (*leaves_of(error), error):
            nearest = next((cls for cls in type(each).__mro__ if cls in self.by_error), None)
            if nearest is not None:
                return each, self.by_error[nearest]
        return error, self.retry

    def outlook(self, decision: Decision, error: BaseException, attempt: int) -> str:
        """Tell in words what follows a failed attempt, for the log."""
        rule = None if isinstance(error, Verdict) else self._met(error)[1]
        number = f", attempt {attempt + 1} of {rule.max_attempts}" if isinstance(rule, Retry) else ""
        match decision:
            case RunAgain():
                return f"again at once{number}"
            case RunLater(delay=delay):
                return f"again in {_seconds(delay)}{number}"
            case HandBack():
                return "handed back to any node, uncounted"
            case ToTheEnd():
                return "put behind all waiting messages"
            case Pause(time=time):
                return f"handler paused for {_seconds(time)}"
            case DeadLetter():
                return "no further attempt"

    @property
    def max_attempts(self) -> int:
        return max(retry.max_attempts for retry in self._all)

    @property
    def asks_for_age(self) -> bool:
        """Tell whether the age of a message may decide."""
        return any(retry.max_age is not None for retry in self._all)

    @property
    def horizon(self) -> timedelta:
        """The longest that any of its rules may go on."""
        return max(retry.horizon for retry in self._all)

    def steady(self) -> Self:
        """The same without jitter."""
        by_error = {
            error: replace(rule, jitter=0) if isinstance(rule, Retry) else rule for error, rule in self.by_error.items()
        }
        return replace(self, retry=replace(self.retry, jitter=0), by_error=by_error)

    @property
    def _all(self) -> list[Retry]:
        return [self.retry, *(rule for rule in self.by_error.values() if isinstance(rule, Retry))]
