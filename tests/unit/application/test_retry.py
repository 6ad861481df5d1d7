"""What becomes of a failed message: verdicts first, then the policy, attempt by attempt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.application.retry import (
    DeadLetter,
    Decision,
    HandBack,
    Pause,
    Policy,
    Retry,
    RetryAfter,
    RunAgain,
    RunLater,
    ToTheEnd,
)
from durable.duration import LATEST, duration, within_calendar
from durable.errors import (
    InvalidMessage,
    InvalidSetting,
    NoUnitOfWork,
    PauseListener,
    PutBack,
    Reject,
    Release,
    RetryLater,
    RoutingError,
    UnknownMessageType,
    WiringError,
)
from durable.storage.outages import is_outage

policies = st.builds(
    Retry,
    immediate=st.integers(0, 5),
    delays=st.lists(st.floats(0, 1e6) | st.timedeltas(timedelta(0), timedelta(days=30)), max_size=5),
    jitter=st.floats(0, 0.99),
)


def decisions(policy: Retry) -> list[Decision]:
    return [Policy(policy).decide(ValueError(), attempt) for attempt in range(1, policy.max_attempts + 1)]


def test_policy_retries_at_once_then_after_each_delay_then_gives_up() -> None:
    policy = Retry(immediate=2, delays=[1, timedelta(minutes=1)], jitter=0)
    assert decisions(policy) == [
        RunAgain(),
        RunAgain(),
        RunLater(timedelta(seconds=1)),
        RunLater(timedelta(minutes=1)),
        DeadLetter(),
    ]


def test_first_failure_is_final_without_retries() -> None:
    assert decisions(Retry(immediate=0, delays=[])) == [DeadLetter()]


def test_default_policy_takes_six_attempts_in_71_seconds() -> None:
    assert Retry(jitter=0).horizon == timedelta(seconds=71)
    assert [type(decision) for decision in decisions(Retry())] == [RunAgain] * 2 + [RunLater] * 3 + [DeadLetter]


def test_the_horizon_is_the_sum_of_the_longest_delays() -> None:
    assert Retry(delays=[10, timedelta(seconds=20)], jitter=0.5).horizon == timedelta(seconds=45)


def test_attempts_beyond_the_last_are_dead_letters() -> None:
    assert Policy(Retry()).decide(ValueError(), 1_000) == DeadLetter()


@pytest.mark.parametrize("attempt", [1, 100])
def test_a_verdict_of_the_handler_comes_before_the_policy(attempt: int) -> None:
    policy = Retry(immediate=5)
    assert Policy(policy).decide(Reject("no"), attempt) == DeadLetter()
    assert Policy(policy).decide(Release(), attempt) == HandBack()
    assert Policy(policy).decide(RetryLater(90), attempt) == RunLater(timedelta(seconds=90))
    assert Policy(policy).decide(RetryLater(timedelta(hours=1)), attempt) == RunLater(timedelta(hours=1))


def test_undecodable_message_is_not_retried() -> None:
    assert Policy(Retry(immediate=5)).decide(InvalidMessage("no JSON"), 1) == DeadLetter()


@given(policies)
def test_policy_makes_exactly_its_declared_attempts(policy: Retry) -> None:
    made = decisions(policy)
    assert made[: policy.immediate] == [RunAgain()] * policy.immediate
    assert all(isinstance(decision, RunLater) for decision in made[policy.immediate : -1])
    assert made[-1] == DeadLetter()
    assert len(made) == 1 + policy.immediate + len(policy.delays)


@given(policies, st.integers())
def test_a_delay_is_varied_within_the_jitter_and_the_horizon_is_never_passed(policy: Retry, seed: int) -> None:
    rng, total = Random(seed), timedelta(0)
    for number, delay in enumerate(policy.delays):
        decision = Policy(policy).decide(ValueError(), policy.immediate + number + 1, rng=rng)
        assert isinstance(decision, RunLater)
        seconds = duration(delay).total_seconds()
        slack = 1e-5 + seconds * 1e-9
        assert seconds * (1 - policy.jitter) - slack <= decision.delay.total_seconds()
        assert decision.delay.total_seconds() <= seconds * (1 + policy.jitter) + slack
        total += decision.delay
    assert total <= policy.horizon + timedelta(milliseconds=1)


def test_simultaneous_failures_are_retried_at_different_times() -> None:
    assert len({Policy(Retry(immediate=0)).decide(ValueError(), 1, rng=Random(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    "wrong", [{"immediate": -1}, {"delays": [1, -1]}, {"delays": [timedelta(-1)]}, {"jitter": 1}, {"jitter": -0.1}]
)
def test_invalid_policy_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        Retry(**wrong)  # type: ignore[arg-type]


class Unavailable(ConnectionError):
    pass


def test_the_nearest_class_of_the_error_counts() -> None:
    by_error: dict[type[Exception], Retry] = {
        OSError: Retry(immediate=1, delays=[]),
        ConnectionError: Retry.never(),
    }
    policy = Policy(Retry(immediate=0, delays=[5], jitter=0), by_error)
    assert policy.decide(OSError(), 1) == RunAgain()
    assert policy.decide(Unavailable(), 1) == DeadLetter()
    assert policy.decide(ValueError(), 1) == RunLater(timedelta(seconds=5))
    assert (policy.max_attempts, policy.horizon) == (2, timedelta(seconds=5))


def test_a_verdict_comes_before_the_rule_for_its_class() -> None:
    assert Policy(by_error={Exception: Retry(immediate=5)}).decide(Reject(), 1) == DeadLetter()


def test_retry_beyond_max_age_is_a_dead_letter() -> None:
    policy = Policy(Retry(immediate=1, delays=[30, 60], jitter=0, max_age=timedelta(minutes=1)))
    assert policy.decide(ValueError(), 1, age=timedelta(seconds=60)) == RunAgain()
    assert policy.decide(ValueError(), 1, age=timedelta(seconds=61)) == DeadLetter()
    assert policy.decide(ValueError(), 2, age=timedelta(seconds=30)) == RunLater(timedelta(seconds=30))
    assert policy.decide(ValueError(), 2, age=timedelta(seconds=31)) == DeadLetter()


@pytest.mark.parametrize("max_age", [0, -1, timedelta(0)])
def test_max_age_must_be_above_zero(max_age: float | timedelta) -> None:
    with pytest.raises(InvalidSetting, match="max_age"):
        Retry(max_age=max_age)


def test_a_steady_policy_has_no_jitter() -> None:
    steady = Policy(Retry(jitter=0.5), {OSError: Retry(jitter=0.5), KeyError: RetryAfter(5)}).steady()
    assert steady.retry.jitter == 0
    assert steady.by_error == {OSError: Retry(jitter=0), KeyError: RetryAfter(5)}


class RateLimited(Exception):
    def __init__(self, retry_after: object = None, headers: dict[str, str] | None = None) -> None:
        super().__init__("too many requests")
        self.retry_after = retry_after
        if headers is not None:
            self.response = SimpleNamespace(headers=headers)


NOW = {"Date": "Fri, 20 Nov 2026 12:00:00 GMT"}


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RateLimited(12), 12),
        (RateLimited(timedelta(minutes=1)), 60),
        (RateLimited(headers={"retry-after": "17"}), 17),
        (RateLimited(headers={"Retry-After": "Fri, 20 Nov 2026 12:00:45 GMT", **NOW}), 45),
        (RateLimited(headers={"Retry-After": "Fri, 20 Nov 2026 12:00:45 GMT"}), 30),
        (RateLimited(headers={"Retry-After": "in a while", **NOW}), 30),
        (RateLimited(headers={"Retry-After": "9" * 400}), 30),
        (RateLimited(headers={}), 30),
        (RateLimited("soon"), 30),
        (RateLimited(), 30),
        (RateLimited(1e9), 3600),
    ],
)
def test_error_sets_the_pause_of_its_handler(error: RateLimited, seconds: float) -> None:
    policy = Policy(by_error={RateLimited: RetryAfter(default=30, longest=3600)})
    decision = policy.decide(error, attempt=99)
    assert decision == Pause(timedelta(seconds=seconds), "RateLimited: too many requests")


@pytest.mark.parametrize(
    "error",
    [
        RateLimited(0),
        RateLimited(-5),
        RateLimited(headers={"Retry-After": "0"}),
        RateLimited(headers={"Retry-After": "Fri, 20 Nov 2026 11:00:00 GMT", **NOW}),
    ],
)
def test_error_without_a_retry_time_makes_a_short_counted_pause(error: RateLimited) -> None:
    policy = Policy(Retry(immediate=1, delays=[]), {RateLimited: RetryAfter(shortest=2)})
    assert policy.decide(error, 1) == Pause(timedelta(seconds=2), "RateLimited: too many requests", counts=True)
    assert policy.decide(error, 2) == DeadLetter()
    assert policy.decide(RateLimited(2), 99) == Pause(timedelta(seconds=2), "RateLimited: too many requests")


def test_pause_of_a_listener_must_be_above_zero() -> None:
    assert Policy().decide(PauseListener(0, "full"), 1) == Pause(timedelta(seconds=1), "full", listener=True)


class Hostile(Exception):
    @property
    def retry_after(self) -> float:
        raise LookupError

    def __str__(self) -> str:
        raise SystemExit


def test_error_with_a_failing_text_is_decided_by_its_type() -> None:
    decision = Policy(by_error={Hostile: RetryAfter(7)}).decide(Hostile(), 1)
    assert decision == Pause(timedelta(seconds=7), "Hostile, whose text cannot be made")


@pytest.mark.parametrize("error", [RoutingError("no route"), UnknownMessageType(), NoUnitOfWork(), WiringError()])
def test_a_mistake_of_the_wiring_is_not_tried_again(error: Exception) -> None:
    policy = Policy(Retry(immediate=5), {Exception: Retry(immediate=5)})
    assert policy.decide(error, 1) == DeadLetter()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_base_exception_is_a_failure(error: BaseException) -> None:
    policy = Policy(Retry(immediate=1, delays=[]))
    assert [policy.decide(error, attempt) for attempt in (1, 2)] == [RunAgain(), DeadLetter()]


def test_a_message_is_put_back_with_the_headers_of_its_verdict() -> None:
    headers = {"lane": "slow", "hop": None}
    assert Policy().decide(PutBack(headers=headers), 99) == ToTheEnd(headers)


@pytest.mark.parametrize("wrong", [{"default": 0}, {"longest": -1}, {"shortest": 0}])
def test_bounds_of_retry_after_must_be_above_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting, match="above 0"):
        RetryAfter(**wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryLater(-1),
        lambda: RetryLater(timedelta.max),
        lambda: RetryLater("3000000d"),
        lambda: PauseListener(-1),
        lambda: PauseListener(timedelta.max),
        lambda: Release(5),  # type: ignore[arg-type]
        lambda: Reject(b"no"),  # type: ignore[arg-type]
        lambda: Reject(reson="no"),  # type: ignore[call-arg]
        lambda: PutBack(header={"a": "b"}),  # type: ignore[call-arg]
        lambda: PutBack(headers={"a": 1}),  # type: ignore[dict-item]
        lambda: PutBack(headers={1: "a"}),  # type: ignore[dict-item]
        lambda: PutBack(headers="abc"),  # type: ignore[arg-type]
        lambda: RetryAfter(shortest=100, longest=1),
        lambda: RetryAfter(longest=timedelta.max),
        lambda: Retry(immediate=10**9),
        lambda: Retry(delays=[timedelta.max]),
        lambda: Retry(delays=[-1]),
    ],
)
def test_impossible_verdict_is_refused_at_its_construction(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidSetting):
        make()


def test_a_misspelt_parameter_of_a_verdict_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidSetting, match="Reject: unknown parameter 'reson'; did you mean 'reason'"):
        Reject(reson="no")  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="PutBack: unknown parameter 'header'; did you mean 'headers'"):
        PutBack(header={})  # type: ignore[call-arg]


def test_circular_causes_of_an_error_are_followed_to_an_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_outage(first)


@given(st.timedeltas())
def test_wait_is_bounded_by_the_end_of_the_calendar(span: timedelta) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    bounded = within_calendar(span, now)
    assert bounded <= span
    assert bounded == span or now + bounded == LATEST


@pytest.mark.parametrize(
    ("error", "attempt", "words"),
    [
        (ValueError(), 1, "again at once, attempt 2 of 4"),
        (ValueError(), 2, "again in 1.5 s, attempt 3 of 4"),
        (ValueError(), 3, "again in 3,600 s, attempt 4 of 4"),
        (ValueError(), 4, "no further attempt"),
        (LookupError(), 1, "no further attempt"),
        (Reject("no"), 1, "no further attempt"),
        (RetryLater(60), 1, "again in 60 s"),
        (Release(), 1, "handed back to any node, uncounted"),
        (PutBack(), 1, "put behind all waiting messages"),
        (PauseListener(5), 1, "handler paused for 5 s"),
        (TimeoutError(), 1, "handler paused for 30 s"),
    ],
)
def test_outlook_tells_the_next_attempt_or_the_end(error: Exception, attempt: int, words: str) -> None:
    policy = Policy(
        Retry(immediate=1, delays=[1.5, 3600], jitter=0), {LookupError: Retry.never(), TimeoutError: RetryAfter()}
    )
    assert policy.outlook(policy.decide(error, attempt), error, attempt) == words
