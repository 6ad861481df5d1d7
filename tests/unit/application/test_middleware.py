"""The onion: which components stand in it, in which order, and what each can do with the rest of it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from durable import HandleNext, Incoming, InvalidSetting, Middleware, Outgoing, SendNext, WiringError
from durable.application.middleware import MiddlewareStack

IDS = [UUID(int=number) for number in range(1, 9)]


class Passing(Middleware):
    """Overrides nothing."""


class Tracing(Middleware):
    """Writes down when it is entered and left."""

    def __init__(self, name: str, steps: list[str]) -> None:
        self._name = name
        self._steps = steps

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        self._steps.append(f"{self._name} in")
        sent = call_next(outgoing)
        self._steps.append(f"{self._name} out")
        return sent

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        self._steps.append(f"{self._name} in")
        result = await call_next(incoming)
        self._steps.append(f"{self._name} out")
        return result


class OnlySends(Middleware):
    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        return call_next(outgoing)


class OnlyHandles(Middleware):
    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


class Core:
    """The innermost: what is sent has ids in order, what is handled returns its message."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def send(self, outgoing: Outgoing) -> UUID | None:
        self.given.append(outgoing.message)
        return IDS[len(self.given) - 1]

    async def handle(self, incoming: Incoming) -> object:
        self.given.append(incoming.message)
        return incoming.message


def incoming(message: object) -> Incoming:
    unused: Any = None
    return Incoming(message, unused, [])


def onion(*components: Middleware) -> MiddlewareStack:
    made = MiddlewareStack()
    for component in components:
        made.use(component, "core")
    return made


class TestOrder:
    async def test_stages_are_nested_from_before_to_after_in_the_order_of_use(self) -> None:
        steps: list[str] = []
        made = MiddlewareStack()
        made.use(Tracing("after 1", steps), "after")
        made.use(Tracing("core 1", steps), "core")
        made.use(Tracing("before 1", steps), "before")
        made.use(Tracing("before 2", steps), "before")
        made.use(Tracing("after 2", steps), "after")
        names = ["before 1", "before 2", "core 1", "after 1", "after 2"]
        expected = [f"{name} in" for name in names] + [f"{name} out" for name in reversed(names)]

        assert made.around_sending(Core().send)(Outgoing("message")) == IDS[0]
        assert steps == expected
        steps.clear()
        assert await made.around_handling(Core().handle)(incoming("message")) == "message"
        assert steps == expected

    def test_side_without_an_override_is_the_plain_function(self) -> None:
        core = Core()
        send, handle = core.send, core.handle
        assert onion().around_sending(send) is send
        assert onion(Passing(), OnlyHandles()).around_sending(send) is send
        assert onion(OnlyHandles()).around_handling(handle) is not handle
        assert onion(Passing(), OnlySends()).around_handling(handle) is handle
        assert onion(OnlySends()).around_sending(send) is not send

    def test_stack_knows_its_handling_components(self) -> None:
        assert onion(OnlyHandles()).handles
        assert not onion(Passing(), OnlySends()).handles

    def test_an_override_may_be_inherited(self) -> None:
        class Derived(OnlySends):
            pass

        send = Core().send
        assert onion(Derived()).around_sending(send) is not send


class TestCallNext:
    async def test_component_may_omit_the_call(self) -> None:
        class Stops(Middleware):
            def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
                return None

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                return "known already"

        core, steps = Core(), list[str]()
        made = onion(Stops(), Tracing("inner", steps))
        assert made.around_sending(core.send)(Outgoing("message")) is None
        assert await made.around_handling(core.handle)(incoming("message")) == "known already"
        assert core.given == steps == []

    async def test_component_may_repeat_the_call(self) -> None:
        class Twice(Middleware):
            def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
                call_next(outgoing)
                return call_next(outgoing)

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                return await call_next(incoming), await call_next(incoming)

        core, steps = Core(), list[str]()
        made = onion(Twice(), Tracing("inner", steps), Twice())
        assert made.around_sending(core.send)(Outgoing("message")) == IDS[3]
        assert core.given == ["message"] * 4
        assert steps == ["inner in", "inner out"] * 2
        handle = made.around_handling(core.handle)
        for _ in range(2):  # nothing of one message is left for the next
            core.given.clear()
            steps.clear()
            assert await handle(incoming("message")) == (("message",) * 2,) * 2
            assert core.given == ["message"] * 4
            assert steps == ["inner in", "inner out"] * 2

    async def test_component_may_replace_the_message(self) -> None:
        class Shouts(Middleware):
            def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
                return call_next(outgoing.replace(message=f"{outgoing.message}!"))

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                return await call_next(incoming.replace(message=f"{incoming.message}!"))

        core = Core()
        made = onion(Shouts(), Shouts())
        outgoing, given = Outgoing("sent"), incoming("handled")
        made.around_sending(core.send)(outgoing)
        await made.around_handling(core.handle)(given)
        assert core.given == ["sent!!", "handled!!"]
        assert (outgoing.message, given.message) == ("sent", "handled")

    async def test_component_may_catch_inner_errors(self) -> None:
        class Catches(Middleware):
            def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
                try:
                    return call_next(outgoing)
                except LookupError:
                    return IDS[7]

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                try:
                    return await call_next(incoming)
                except LookupError:
                    return "caught"

        class Fails(Middleware):
            def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
                raise LookupError

            async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
                raise LookupError

        made = onion(Catches(), Fails())
        assert made.around_sending(Core().send)(Outgoing("message")) == IDS[7]
        assert await made.around_handling(Core().handle)(incoming("message")) == "caught"
        with pytest.raises(LookupError):
            onion(Fails(), Catches()).around_sending(Core().send)(Outgoing("message"))


class TestWiring:
    def test_invalid_component_is_refused_with_advice(self) -> None:
        class SendsLater(Middleware):
            async def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:  # type: ignore[override]
                return None

        class HandlesAtOnce(Middleware):
            def handle(self, incoming: Incoming, call_next: HandleNext) -> object:  # type: ignore[override]
                return None

        wrong: dict[Any, str] = {
            OnlySends: "OnlySends is no Middleware.*use an instance",
            len: "len is no Middleware.*derive it from durable.Middleware",
            SendsLater(): "SendsLater.send must not be async",
            HandlesAtOnce(): "HandlesAtOnce.handle must be async",
        }
        for component, reason in wrong.items():
            with pytest.raises(InvalidSetting, match=reason):
                MiddlewareStack().use(component, "core")

    def test_use_refuses_an_unknown_stage(self) -> None:
        stage: Any = "middle"
        with pytest.raises(InvalidSetting, match="no stage 'middle'; use 'before', 'core' or 'after'"):
            MiddlewareStack().use(Passing(), stage)

    def test_late_component_is_refused(self) -> None:
        made = onion(OnlySends())
        made.around_sending(Core().send)
        with pytest.raises(WiringError, match="before it starts or sends"):
            made.use(OnlyHandles(), "core")


class TestOutgoing:
    def test_added_headers_override_the_given_ones(self) -> None:
        outgoing = Outgoing("message", options={"headers": {"tenant": "blue", "trace": "1"}, "key": "order-17"})
        changed = outgoing.with_headers({"trace": "2", "user": "ann"})
        assert changed.headers == {"tenant": "blue", "trace": "2", "user": "ann"}
        assert changed.options.get("key") == "order-17"
        assert outgoing.headers == {"tenant": "blue", "trace": "1"}
        assert Outgoing("message").with_headers({"trace": "1"}).headers == {"trace": "1"}
        assert Outgoing("message").headers == {}

    def test_outgoing_and_incoming_are_immutable(self) -> None:
        outgoing: Any = Outgoing("message")
        with pytest.raises(AttributeError):
            outgoing.message = "other"
        given: Any = incoming("message")
        with pytest.raises(AttributeError):
            given.message = "other"

    def test_replacement_of_an_unknown_field_is_refused(self) -> None:
        with pytest.raises(TypeError, match="mesage"):
            Outgoing("message").replace(mesage="other")


class TestIncoming:
    def test_the_messages_are_those_of_the_call(self) -> None:
        assert list(incoming("message").messages) == ["message"]
        assert list(incoming(["one", "two"]).messages) == ["one", "two"]
