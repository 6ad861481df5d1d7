"""The circuit breaker of a handler, as a rule: what became of its messages in, whether to stop it out.

            failures / messages >= failure_rate, of at_least messages within the window
    CLOSED ----------------------------------------------------------------------------> OPEN
       ^                                                                                   | open_for
       |           handled                                                                 v
       +--------------------------------------------- one message at a time, over all nodes: HALF-OPEN
                                                           failed: OPEN again, for longer

A message counts once, when it was handled or when its immediate attempts are used up. Verdicts of the handler on a
message (Reject, RetryLater, Release, PauseListener) and undecodable messages do not count.

All nodes count together: each counts what it has handled itself, and hears from time to time what the others count.
The state is a row of `circuits`, which all of them obey.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

from durable.arguments import checked_class
from durable.duration import Duration, duration
from durable.errors import InvalidSetting

_BUCKETS = 20  # parts of the window that are forgotten one after another


@checked_class
@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """Circuit breaker: stops a handler while too many of its messages fail.

    `failure_rate` (0 to 1) of the messages of the last `window`, when they are `at_least` so many. After `open_for` it
    is tried with single messages; each that fails doubles the time to the next, up to `longest`. Times are seconds,
    "10s" or timedeltas. The defaults of the rate are those of MassTransit's kill switch and breaker: 15 % of 10.
    """

    failure_rate: float = 0.15
    at_least: int = 10
    window: Duration = 60
    open_for: Duration = 10
    longest: Duration = 300

    def __post_init__(self) -> None:
        for name in ("window", "open_for", "longest"):
            if duration(getattr(self, name)) <= timedelta(0):
                raise InvalidSetting(f"CircuitBreaker: {name} must be above 0")
        if not 0 < self.failure_rate <= 1:
            raise InvalidSetting("CircuitBreaker: failure_rate must be above 0 and at most 1, such as 0.15")
        if self.at_least < 1:
            raise InvalidSetting("CircuitBreaker: at_least must be at least 1")


@dataclass(slots=True)
class _Bucket:
    began: float
    messages: int = 0
    failures: int = 0


class FailureWindow:
    """Counts what became of the messages of the last while.

    >>> window = FailureWindow(CircuitBreaker(failure_rate=0.5, at_least=4))
    >>> [window.failed(now=0.0), window.handled(2, now=1.0), window.failed(now=2.0)]
    [None, None, '2 of 4 messages failed within 60 s']
    """

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker = breaker
        self._seconds = duration(breaker.window).total_seconds()
        self._buckets: deque[_Bucket] = deque()
        self._messages = 0
        self._failures = 0
        self._others = 0, 0

    def handled(self, count: int, now: float) -> None:
        """`now` is in seconds of any clock that never goes back."""
        self._add(count, 0, now)

    def failed(self, now: float) -> str | None:
        """Count a failure. Why the handler is to be stopped, if it is."""
        self._add(1, 1, now)
        return self._reason()

    def counts(self, now: float) -> tuple[int, int]:
        """Return the counts of this node: messages and failures."""
        self._forget(now)
        return self._messages, self._failures

    def heard(self, messages: int, failures: int, now: float) -> str | None:
        """Take the counts of the other nodes. Returns why to stop the handler, or None."""
        self._forget(now)
        self._others = messages, failures
        return self._reason()

    def clear(self) -> None:
        """Begin anew, as when the circuit closes."""
        self._buckets.clear()
        self._messages = self._failures = 0
        self._others = 0, 0

    def _reason(self) -> str | None:
        messages, failures = self._messages + self._others[0], self._failures + self._others[1]
        if not failures or messages < self.breaker.at_least or failures < self.breaker.failure_rate * messages:
            return None
        return f"{failures} of {messages} messages failed within {self._seconds:g} s"

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0].began <= now - self._seconds:
            old = self._buckets.popleft()
            self._messages -= old.messages
            self._failures -= old.failures

    def _add(self, messages: int, failures: int, now: float) -> None:
        self._forget(now)
        if not self._buckets or now - self._buckets[-1].began >= self._seconds / _BUCKETS:
            self._buckets.append(_Bucket(now))
        self._buckets[-1].messages += messages
        self._buckets[-1].failures += failures
        self._messages += messages
        self._failures += failures
