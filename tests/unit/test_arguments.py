"""Arguments: every parameter of everything public, given what it must not be given, and spelt wrongly."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import durable
from durable import (
    Bus,
    CircuitBreaker,
    Context,
    Depends,
    DurableError,
    InvalidMessage,
    InvalidSetting,
    JsonCodec,
    Keys,
    MsgpackCodec,
    NoUnitOfWork,
    Outbox,
    PauseListener,
    Retry,
    RetryAfter,
    RetryLater,
    Settings,
    UnknownMessageType,
    WiringError,
    message,
    register_codec,
    upcaster,
)
from durable.application.middlewares import Validation
from durable.asgi import DurableMiddleware
from durable.calls import call, service
from durable.duration import duration
from durable.envelope import REPLY_TO, Envelope, LeasedEnvelope, new_id
from durable.outbox.envelope_factory import SendOptions
from durable.testing import InMemoryBus


@message("arguments.placed")
class Placed(msgspec.Struct):
    number: int = 1


@service("arguments.counting")
class Counting:
    async def count(self, number: int) -> int:
        return number


@message("arguments.old")
class Old(msgspec.Struct):
    number: int = 1


@message("arguments.billed")
class Billed(msgspec.Struct):
    number: int = 1


class Call(NamedTuple):
    """Something public, and arguments with which it may be called."""

    name: str
    function: Callable[..., Any]
    args: dict[str, Any]
    options: type | None = None
    """The TypedDict of its further options."""


class Odd:
    """What no parameter takes."""

    def __repr__(self) -> str:
        return "Odd()"


ODD = Odd()
TEXTS = [17, b"x", ["x"], ODD]
COUNTS = ["3", 1.5, True, math.nan, ODD]
NUMBERS = ["3", True, math.nan, math.inf, ODD]
FLAGS = ["yes", 1, ODD]
CLASSES = ["name", 17, ODD]
SPANS = ["soon", "1 fortnight", True, math.nan, math.inf, b"5", ODD]
FUNCTIONS = ["name", 17, ODD]
MOMENTS = ["2030-12-31", 17, datetime(2030, 12, 31), ODD]
HEADERS = [17, "a=b", ["a"], {"a": 1}, {1: "a"}, ODD]

WRONG: dict[str, list[Any]] = {
    "str": [*TEXTS, None],
    "str | None": TEXTS,
    "str | Provider | None": TEXTS,
    "int": [*COUNTS, None],
    "int | None": COUNTS,
    "MaxBatch | None": COUNTS,
    "float": [*NUMBERS, None],
    "bool": [*FLAGS, None],
    "type": [*CLASSES, None],
    "MessageClass": [*CLASSES, None],
    "MessageClass | None": CLASSES,
    "ServiceClass": [*CLASSES, None],
    "type[Old]": CLASSES,
    "type[New]": CLASSES,
    "type[Exception]": [*CLASSES, int, None],
    "Duration": [*SPANS, None],
    "Duration | None": SPANS,
    "Sequence[Duration]": [17, "10s", ["1 fortnight"], [None], ODD],
    "datetime | None": MOMENTS,
    "datetime | Duration | None": ["soon", "1 fortnight", True, math.nan, datetime(2030, 12, 31), ODD],
    "UUID": ["x", 17, None, ODD],
    "UUID | str": [17, None, ODD],
    "Callable[..., Any]": [*FUNCTIONS, None],
    "Retry | None": [3, "often", Retry, ODD],
    "RetryPolicy | RetryAfter": [3, None, ODD],
    "ByError | None": [17, [ValueError], {ValueError: 3}, {"ValueError": Retry()}, {int: Retry()}, ODD],
    "CircuitBreaker | None": [3, CircuitBreaker, ODD],
    "OnDeadLetter | None": ["stop", 17, ODD],
    "OnExpiry | None": ["stop", 17, ODD],
    "Mapping[str, int] | None": [17, ["a"], {"a": "b"}, {1: 1}, ODD],
    "Mapping[str, str] | None": HEADERS,
    "Mapping[str, str]": [*HEADERS, None],
    "Mapping[str, bytes]": [17, ["a"], {"a": "b"}, {"a": b"short"}, {1: bytes(32)}, None, ODD],
    "Annotated[Callable[..., A], 'a class declared with @service']": [*FUNCTIONS, None],
    "OnError | None": FUNCTIONS,
    "Callable[[], Keys]": [*FUNCTIONS, None],
    "Mapping[type, Check] | None": [17, {"a": len}, {Placed: 17}, ODD],
    "Mode": ["half", 17, None, ODD],
    "Misfire": ["never", 17, None, ODD],
    "Stage": ["outside", 17, None, ODD],
    "Middleware": [17, None, ODD],
    "Codec": [17, None, ODD],
    "AsyncEngine | None": [17, "postgresql://", ODD],
    "Engine | None": [17, "postgresql://", ODD],
    "Sequence[Transport]": [17, [17], ["tcp"], ODD],
    "Settings | None": [17, {"batch_size": 5}, ODD],
    "TracerProvider | None": [17, ODD],
    "MeterProvider | None": [17, ODD],
    "Collector | None": [17, ODD],
    "AnySession": [17, None, ODD],
    "object | Factory": [17, "text", None, ODD],
    "object": [17, "text", None, ODD],
}
"""What does not fit each annotation."""

MESSAGES = {"object", "object | Factory"}
"""Annotations of what is refused as no message, whatever its parameter is called."""


def made_outbox(bus: Bus) -> Outbox:
    session = Session()
    return bus.runtime.sessions.outbox(session)


def made_context(outbox: Outbox) -> Context:
    envelope = Envelope(
        id=new_id(),
        message_type="arguments.placed",
        destination="local",
        source="shop",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime(2024, 2, 29, tzinfo=UTC),
        headers={REPLY_TO: "tcp://127.0.0.1:2301"},
    )
    return Context(LeasedEnvelope(envelope), 1, outbox)


def offered() -> Bus:
    bus = Bus("offering")
    bus.offer(Counting, Counting())
    return bus


def requesting(outbox: Outbox, message: Any, **given: Any) -> object:
    return outbox.request(message, Billed, **given)


def calls() -> Iterator[Call]:
    bus = Bus("arguments")
    bus.expects(Billed, at="tcp://127.0.0.1:2301")
    bus.route(Placed, to="tcp://127.0.0.1:2302")
    bus.subscribe(Old, to="tcp://127.0.0.1:2302")
    outbox = made_outbox(bus)
    context = made_context(outbox)

    async def handler(order: Placed) -> None: ...

    yield Call("Bus", Bus, {"service": "shop"})
    yield Call("handles", lambda **given: Bus("a").handles(**given)(handler), {"cls": Placed})
    yield Call("on_error", bus.on_error, {"retry": Retry()})
    yield Call("keys_from", bus.keys_from, {"source": Keys})
    yield Call("use", bus.use, {"middleware": Validation()})
    yield Call("trace", bus.trace, {})
    yield Call("meter", bus.meter, {})
    yield Call("listen", bus.listen, {"uri": "tcp://127.0.0.1:2303"})
    yield Call("asgi", bus.asgi, {})
    yield Call("metrics_app", bus.metrics_app, {})
    yield Call("route", bus.route, {"cls": Placed, "to": "tcp://127.0.0.1:2302"})
    yield Call("subscribe", bus.subscribe, {"cls": Old, "to": "tcp://127.0.0.1:2302"})
    yield Call("every", bus.every, {"cron": "0 3 * * *", "message": Placed(), "name": "nightly"}, SendOptions)
    yield Call("enlist", bus.enlist, {"session": Session()})
    yield Call("pause", bus.pause, {"cls": Placed})
    yield Call("resume", bus.resume, {"cls": Placed})
    yield Call("cancel", bus.cancel, {"message": new_id()})
    yield Call("wait_for", bus.wait_for, {"message": new_id(), "timeout": 5})
    yield Call("expects", lambda **given: Bus("b").expects(**given), {"cls": Billed, "at": "tcp://127.0.0.1:2303"})
    yield Call("offer", lambda **given: Bus("c").offer(**given), {"contract": Counting, "implementation": Counting()})
    yield Call("withdraw", offered().withdraw, {"contract": Counting})
    yield Call("connect", bus.connect, {"address": "tcp://127.0.0.1:2309"})
    yield Call("disconnect", bus.disconnect, {"address": "tcp://127.0.0.1:2309"})
    yield Call("providers", bus.providers, {"contract": Counting})
    yield Call("caller", bus.caller, {"contract": Counting})
    yield Call("service", service, {"name": "counting"})
    yield Call("call", call, {})
    yield Call("Outbox.request", partial(requesting, outbox), {"message": Placed()}, SendOptions)
    yield Call("run_now", bus.run_now, {"message": new_id()})
    yield Call("reschedule", bus.reschedule, {"message": new_id(), "delay": 5})
    yield Call("run_schedule", bus.run_schedule, {"name": "nightly"})
    yield Call("reschedule_next", bus.reschedule_next, {"name": "nightly", "delay": 5})
    for name, sender in (("Outbox", outbox), ("Context", context)):
        yield Call(f"{name}.send", sender.send, {"message": Placed()}, SendOptions)
        yield Call(f"{name}.publish", sender.publish, {"message": Old()}, SendOptions)
    yield Call("Context.reply", context.reply, {"message": Placed()}, SendOptions)
    yield Call("circuit.open", context.circuit.open, {})
    yield Call("Retry", Retry, {})
    yield Call("RetryAfter", RetryAfter, {})
    yield Call("CircuitBreaker", CircuitBreaker, {})
    yield Call("Keys", Keys, {"keys": {"a": bytes(32)}})
    yield Call("RetryLater", RetryLater, {"after": 5})
    yield Call("PauseListener", PauseListener, {"for_": 5})
    yield Call("Depends", Depends, {"provider": len})
    yield Call("message", message, {"name": "arguments.another"})
    yield Call("upcaster", upcaster, {"old": Old, "to": Placed})
    yield Call("register_codec", register_codec, {"codec": JsonCodec()})
    yield Call("JsonCodec", JsonCodec, {})
    yield Call("MsgpackCodec", MsgpackCodec, {})
    yield Call("Validation", Validation, {})


CALLS = list(calls())
NO_PARAMETERS = {"overrides", "options", "named", "self", "answers", "methods"}
VERDICTS = {"RetryLater", "PauseListener"}  # exceptions: their reason is whatever can be told
SIGNATURES: dict[str, Callable[..., Any]] = {
    "handles": Bus.handles,
    "expects": Bus.expects,
    "offer": Bus.offer,
    "Outbox.request": Outbox.request,
}


def parameters(call: Call) -> dict[str, str]:
    """The annotation of each parameter and option, as it is written."""
    found = inspect.signature(SIGNATURES.get(call.name, call.function)).parameters.values()
    own = {each.name: each.annotation for each in found if each.name not in NO_PARAMETERS}
    if call.name in VERDICTS:
        del own["reason"]
    options = {} if call.options is None else call.options.__annotations__
    own |= {name: getattr(hint, "__forward_arg__", hint) for name, hint in options.items()}
    return {name: hint if isinstance(hint, str) else inspect.formatannotation(hint) for name, hint in own.items()}


CASES = [
    pytest.param(call, name, hint, value, id=f"{call.name}-{name}-{value!r}")
    for call in CALLS
    for name, hint in parameters(call).items()
    for value in WRONG[hint]
    if not (call.name == "every" and name in ("at", "delay", "id_from"))  # options that it does not have
]


DELAYED = [call for call in CALLS if "delay" in parameters(call) and call.name != "every"]


GIVEN_BY_DURABLE = {
    "Codec", "Envelope", "HandleNext", "Incoming", "Middleware", "Outgoing", "SendNext", "UnitOfWork", "Settings",
    "Delivery", "Receipt",
}  # fmt: skip
"""Protocols, base classes, and what applications are given; Settings has a test of its own."""

WITHOUT_ARGUMENTS = {
    "statistics", "unit_of_work", "serve", "run", "running_on", "configure", "send", "publish", "request",
}  # fmt: skip
"""Methods of Bus that take none, or hand all of them on: configure() to Settings, others to Outbox."""


def run(call: Call, given: dict[str, Any]) -> None:
    positional = [given.pop("errors")] if "errors" in given else []
    result = call.function(*positional, **given)
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result


@pytest.mark.parametrize(("call", "name", "hint", "value"), CASES)
def test_argument_of_another_kind_is_refused_with_the_name_of_its_parameter(
    call: Call, name: str, hint: str, value: Any
) -> None:
    with pytest.raises((WiringError, InvalidMessage)) as refusal:
        run(call, {**call.args, name: value})

    assert hint in MESSAGES or name in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("call", [call for call in CALLS if call.name not in VERDICTS], ids=lambda call: call.name)
def test_misspelt_parameter_is_refused_with_the_nearest_one(call: Call) -> None:
    for name in parameters(call):
        if name in ("errors", "message"):
            continue
        misspelt = f"{name[:-1]}x{name[-1]}"
        with pytest.raises(DurableError, match=f"unknown .*'{misspelt}'") as refusal:
            run(call, {**call.args, misspelt: 1})
        assert "did you mean" in str(refusal.value) or "known: " in str(refusal.value)


def test_rule_for_no_error_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="on_error: errors: give at least one"):
        Bus("a").on_error(retry=Retry())


def test_all_public_names_are_among_the_calls() -> None:
    told = {"Context": "Context.send", "Outbox": "Outbox.send"}
    covered = {call.name for call in CALLS}
    for name in durable.__all__:
        value = getattr(durable, name)
        is_error = isinstance(value, type) and issubclass(value, DurableError) and name not in VERDICTS
        if callable(value) and not is_error and name not in GIVEN_BY_DURABLE:
            assert told.get(name, name) in covered, name
    methods = {name for name, value in vars(Bus).items() if inspect.isroutine(value) and not name.startswith("_")}
    assert methods - covered == WITHOUT_ARGUMENTS


@pytest.mark.parametrize("name", Settings.model_fields)
def test_setting_of_another_kind_is_refused_by_its_name(name: str) -> None:
    makers: list[Callable[..., Any]] = [
        Settings,
        lambda **given: Bus("a", **given),
        lambda **given: Bus("a").configure(**given),
    ]
    for make in makers:
        with pytest.raises(InvalidSetting, match=f"^{name}: "):
            make(**{name: ODD})
        with pytest.raises(InvalidSetting, match=f"unknown .*'{name[1:]}x'|{name[1:]}x: unknown setting"):
            make(**{f"{name[1:]}x": 1})


# ------------------------------------------------------------------ decorators


def clock() -> int:
    return 1


def test_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"Odd: write @message\("):
        message(Odd)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"@bus\.handles\(OrderPlaced\)"):
        Bus("a").handles(clock)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"cls='arguments.placed': .*@bus\.handles\(OrderPlaced\)"):
        Bus("a").handles("arguments.placed")  # type: ignore[arg-type]


def test_mistake_in_a_handler_names_the_handler() -> None:
    async def reserve(order: Placed) -> None: ...

    mistakes: list[dict[str, Any]] = [
        {"retry": 3},
        {"timeout": "soon"},
        {"concurrency": "8"},
        {"timeout": 0},
        {"timeout": "-1"},
    ]
    for wrong in mistakes:
        with pytest.raises(InvalidSetting, match=rf"reserve.*{next(iter(wrong))}"):
            Bus("a").handles(Placed, **wrong)(reserve)


@pytest.mark.parametrize("wrong", [17, "name", Odd, Odd()])
def test_handler_other_than_a_function_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSetting, match="give a function"):
        Bus("a").handles(Placed)(wrong)


def test_generator_handler_is_refused() -> None:
    def gives(order: Placed) -> Iterator[Old]:
        yield Old()

    async def gives_async(order: Placed) -> AsyncIterator[Old]:
        yield Old()

    for function in (gives, gives_async):
        with pytest.raises(InvalidSetting, match=f"{function.__name__}: must not yield"):
            Bus("a").handles(Placed)(function)


class ForeignDepends:
    """What frameworks call Depends."""

    def __init__(self, dependency: Callable[..., Any]) -> None:
        self.dependency = dependency


ForeignDepends.__name__ = "Depends"


async def of_ours(order: Placed, now: int = Depends(clock)) -> None: ...  # type: ignore[assignment]
async def of_others(order: Placed, now: int = ForeignDepends(clock)) -> None: ...  # type: ignore[assignment]
async def marked_by_others(order: Placed, now: Annotated[int, ForeignDepends(clock)]) -> None: ...
async def marked_by_the_class(order: Placed, now: Annotated[int, Depends] = 1) -> None: ...


@pytest.mark.parametrize("function", [of_ours, of_others, marked_by_others, marked_by_the_class])
def test_dependency_without_a_call_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidSetting, match=r"parameter 'now': write now: Annotated\[int, Depends\("):
        Bus("a").handles(Placed)(function)


async def by_position(order: Placed, /) -> None: ...
async def optional_message(order: Placed | None = None) -> None: ...
async def optional_session(order: Placed, session: AsyncSession | None = None) -> None: ...


@pytest.mark.parametrize("function", [by_position, optional_message, optional_session])
def test_parameter_without_a_value_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidSetting, match=f"{function.__name__}: parameter"):
        Bus("a").handles(Placed)(function)


def depends_on_itself(value: Annotated[int, "replaced below"]) -> int:
    return value


depends_on_itself.__annotations__["value"] = Annotated[int, Depends(depends_on_itself)]


def test_provider_depending_on_itself_is_refused() -> None:
    async def reserve(order: Placed, value: Annotated[int, Depends(depends_on_itself)]) -> None: ...

    reserve.__annotations__["value"] = Annotated[int, Depends(depends_on_itself)]
    with pytest.raises(InvalidSetting, match="depends_on_itself depends on itself"):
        Bus("a").handles(Placed)(reserve)


# ------------------------------------------------------------------ blocks and names


async def test_async_block_of_enlist_is_refused_with_the_right_one() -> None:
    bus = Bus("a", "postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(WiringError, match=r"write `with bus.enlist\(session\)`"):
        async with bus.enlist(Session()):  # type: ignore[attr-defined]
            pass


async def test_run_within_an_event_loop_is_refused_before_a_coroutine_is_made() -> None:
    with pytest.raises(WiringError, match=r"write `await bus.serve\(\)`, or `async with bus`"):
        Bus("a", "postgresql+asyncpg://nobody@127.0.0.1:1/nothing").run()


def test_block_without_async_is_refused() -> None:
    bus = Bus("a", "postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(WiringError, match="async with bus"), bus:
        pass
    uow = bus.unit_of_work()
    with pytest.raises(WiringError, match=r"async with bus.unit_of_work\(\)"), uow:
        pass


@pytest.mark.parametrize("send", ["send", "request", "publish", "outbox"])
def test_message_before_the_block_is_refused(send: str) -> None:
    uow = Bus("a", "postgresql+asyncpg://nobody@127.0.0.1:1/nothing").unit_of_work()
    with pytest.raises(NoUnitOfWork, match=r"not entered.*async with bus.unit_of_work\(\)"):
        getattr(uow, send)(object())


@pytest.mark.parametrize("name", ["", "My Service!", "a" * 101, "a\nb", "-a", "a b", "a/b", "ä"])
def test_service_name_unfit_for_addresses_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match="service="):
        Bus(name)


def test_misspelt_option_is_refused_by_bus_send_with_the_nearest_one() -> None:
    bus = Bus("a")
    bus.route(Placed, to="tcp://127.0.0.1:2302")
    outbox = made_outbox(bus)

    for send in (outbox.send, outbox.publish, made_context(outbox).send, made_context(outbox).reply):
        with pytest.raises(InvalidSetting, match="unknown option 'dealy'; did you mean 'delay'"):
            send(Placed(), dealy=60)  # type: ignore[call-arg]
    assert not outbox.pending


@pytest.mark.parametrize("call", DELAYED, ids=lambda call: call.name)
@pytest.mark.parametrize("delay", [-5, timedelta(seconds=-1), "-0.5"])
def test_negative_delay_is_refused_with_advice(call: Call, delay: object) -> None:
    with pytest.raises((InvalidSetting, InvalidMessage), match=r"delay=.*-.* is negative; give 0 or more"):
        run(call, call.args | {"delay": delay})


@pytest.mark.parametrize("function", [Bus("a").route, Bus("a").subscribe])
def test_name_instead_of_a_message_class_is_refused_with_an_example(function: Callable[..., object]) -> None:
    with pytest.raises(InvalidSetting, match=r"cls='arguments\.placed': give a message class, such as OrderPlaced"):
        function("arguments.placed", to="tcp://127.0.0.1:2302")


def test_engine_of_another_kind_is_refused_in_good_english() -> None:
    with pytest.raises(InvalidSetting, match="engine=17: give an AsyncEngine"):
        Bus("a", engine=17)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [{}, [{}], "done", 1])
def test_result_other_than_a_message_is_refused_with_advice(result: object) -> None:
    with pytest.raises(
        UnknownMessageType,
        match=r"^(dict|str|int) is not a message: give an instance .*; a handler returns a message, a list of them, or",
    ):
        made_outbox(Bus("a")).cascade(result)


def test_unexpected_answer_is_refused_with_the_declaration() -> None:
    with pytest.raises(InvalidMessage, match=r"declare bus\.expects\(Billed\)"):
        made_outbox(Bus("a")).request(Placed(), Billed)


def test_expected_answer_with_a_handler_is_refused_in_both_orders() -> None:
    async def handle(message: Billed) -> None: ...

    expecting, handling = Bus("a"), Bus("a")
    expecting.expects(Billed)
    handling.handles(Billed)(handle)

    with pytest.raises(InvalidSetting, match=r"handled by bus.expects\(\) already; .*remove one of the two"):
        expecting.handles(Billed)(handle)
    with pytest.raises(InvalidSetting, match=r"expects: .*test_arguments.*handle already; .*remove one of the two"):
        handling.expects(Billed)


def test_message_beyond_a_limit_is_refused_with_advice() -> None:
    outbox = made_outbox(Bus("a", max_message_bytes=5, max_headers=1))
    for options in ({}, {"headers": {"a": "b", "c": "d"}}):
        with pytest.raises(InvalidMessage, match=r"\); send less, .*, or raise the setting here and at the receivers"):
            outbox.send(Placed(number=1 if options else 10**9), to="tcp://127.0.0.1:2302", **options)  # type: ignore[arg-type]


def test_class_instead_of_a_message_is_refused() -> None:
    with pytest.raises(UnknownMessageType, match="send an instance"):
        made_outbox(Bus("a")).send(Placed)


@pytest.mark.parametrize("option", sorted(SendOptions.__annotations__))
def test_option_of_none_equals_an_omitted_option(option: str) -> None:
    bus = Bus("a")
    bus.route(Placed, to="tcp://127.0.0.1:2302")
    outbox = made_outbox(bus)

    outbox.send(Placed(), **{option: None})

    (envelope,) = outbox.pending
    assert (envelope.headers, envelope.execution_time, envelope.deliver_by) == ({}, None, None)


# ------------------------------------------------------------------ lengths of time


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (10, 10),
        (0.5, 0.5),
        (timedelta(minutes=1), 60),
        ("10s", 10),
        ("10", 10),
        ("500ms", 0.5),
        ("5m", 300),
        ("5min", 300),
        ("1h30m", 5_400),
        ("1h 30m", 5_400),
        ("1.5h", 5_400),
        ("2d", 172_800),
        ("1w", 604_800),
        (" 7d ", 604_800),
    ],
)
def test_length_of_time_is_read(written: Any, seconds: float) -> None:
    assert duration(written) == timedelta(seconds=seconds)


@pytest.mark.parametrize("written", ["", "s", "1 fortnight", "1y", "5 mi", "1h30", "h1", "1,5h", "1e3", "--1", "1m1x"])
def test_text_of_no_duration_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="is no length of time; give seconds, a timedelta, or text such as"):
        duration(written)


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_length_of_time_in_parts_is_their_sum(days: int, hours: int, minutes: int, seconds: int, ms: int) -> None:
    text = f"{days}d{hours}h{minutes}m{seconds}s{ms}ms"

    assert duration(text) == timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=ms)


def test_length_of_time_is_written_the_same_way_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hour = timedelta(hours=1)
    monkeypatch.setenv("DURABLE_SEND_TIMEOUT", "1h")
    bus = Bus("a", drain_timeout="60m")
    bus.route(Placed, to="tcp://127.0.0.1:2302")

    async def reserve(order: Placed) -> None: ...

    bus.handles(Placed, timeout="1h")(reserve)
    outbox = made_outbox(bus)
    outbox.send(Placed(), delay="1h", deliver_by="2h", to="tcp://127.0.0.1:2302")
    made_context(outbox).send(Placed(), delay="1h", to="tcp://127.0.0.1:2302")
    with pytest.raises(InvalidSetting, match="hour"):
        Settings(dedupe_window="59m")  # type: ignore[arg-type]

    assert bus.settings.send_timeout == bus.settings.drain_timeout == hour
    assert bus.application.handlers["arguments.placed"].timeout == hour
    assert [envelope.execution_time - envelope.sent_at for envelope in outbox.pending if envelope.execution_time] == [
        hour,
        hour,
    ]
    assert Retry(delays=["1h"], max_age="1h").delays == ["1h"]
    assert RetryLater("1h").after == PauseListener("1h").for_ == hour
    assert CircuitBreaker(window="1h").window == "1h"


async def nowhere(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (DurableMiddleware, {"app": nowhere, "buss": Bus("a")}, "unknown parameter 'buss'; did you mean 'bus'"),
        (DurableMiddleware, {"app": nowhere, "bus": "x"}, "DurableMiddleware: bus='x': give a Bus"),
        (DurableMiddleware, {"app": nowhere, "bus": Bus("a"), "lifespan": "no"}, "lifespan='no': give True or False"),
        (InMemoryBus, {"bus": 5}, "InMemoryBus: bus=5: give a Bus"),
        (Bus("a").unit_of_work, {"timeot": 5}, "unknown parameter 'timeot'; did you mean 'timeout'"),
    ],
)
def test_misspelt_argument_of_an_entry_point_is_refused_with_its_fault(
    make: Callable[..., object], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(said)):
        make(**given)


def test_argument_too_many_is_refused_with_the_names_of_those_taken() -> None:
    bus: Any = Bus("arguments", database="postgresql://localhost/none")
    with pytest.raises(InvalidSetting, match=r"^route: takes 1 argument without a name \(cls\), and got 2$"):
        bus.route(Placed, Placed, to="tcp://127.0.0.1:1")
    retry: Any = Retry
    with pytest.raises(InvalidSetting, match=r"^Retry: takes 4 arguments without a name \(immediate, .*got 5$"):
        retry(1, [1], 0.1, None, 5)


def test_value_is_shown_without_its_place_in_memory() -> None:
    bus: Any = Bus("arguments", database="postgresql://localhost/none")
    with pytest.raises(InvalidSetting, match=r"cls=<function clock>: give the message class"):
        bus.handles(clock)


def test_number_of_retries_is_refused_with_an_example() -> None:
    bus: Any = Bus("arguments", database="postgresql://localhost/none")
    example = r"retry=3: give a Retry, such as Retry\(delays=\[1, '10s'\]\)"
    with pytest.raises(InvalidSetting, match=example):
        bus.handles(Placed, retry=3)(lambda placed: None)
    with pytest.raises(InvalidSetting, match=example):
        bus.on_error(LookupError, retry=3)
