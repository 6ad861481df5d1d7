"""The components that come with durable, each by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pytest
from pydantic import BaseModel, Field, model_validator

from durable import Context, Incoming, InvalidMessage, InvalidSetting, Outgoing, message
from durable.application.middlewares import Logging, Validation
from durable.envelope import Envelope, LeasedEnvelope, new_id
from durable.testing import Chaos, ChaosError

ID = UUID(int=1)


@message("middlewares.struct")
class Struct(msgspec.Struct):
    number: int = 0


@message("middlewares.limited")
class Limited(Struct):
    """Derives from another message."""


@message("middlewares.dataclass")
@dataclass
class Dataclass:
    number: int = 0
    inner: Struct = field(default_factory=Struct)


@message("middlewares.attrs")
@attrs.define
class Attrs:
    number: int = 0


@message("middlewares.model")
class Model(BaseModel):
    number: int = Field(default=0, lt=100)

    @model_validator(mode="after")
    def not_unlucky(self) -> Model:
        if self.number == 13:
            raise ValueError("unlucky")
        return self


def sent(_: Outgoing) -> UUID | None:
    return ID


async def handled(_: Incoming) -> object:
    return "result"


def context(attempt: int = 1) -> Context:
    outbox: Any = None
    return Context(LeasedEnvelope(envelope()), attempt, outbox)


def envelope() -> Envelope:
    return Envelope(
        id=new_id(),
        message_type="middlewares.struct",
        destination="local",
        source="shop",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime(2024, 2, 29, tzinfo=UTC),
    )


def incoming(given: object, *contexts: Context) -> Incoming:
    session: Any = None
    return Incoming(given, session, contexts or [context()], "shop.handle")


class TestValidation:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda value: Struct(value), id="msgspec"),
            pytest.param(lambda value: Dataclass(value), id="dataclass"),
            pytest.param(lambda value: Dataclass(inner=Struct(value)), id="nested"),
            pytest.param(lambda value: Attrs(value), id="attrs"),
            pytest.param(lambda value: Model.model_construct(number=value), id="pydantic"),
        ],
    )
    def test_value_unfit_for_its_annotation_is_refused_at_send(self, make: Callable[[Any], object]) -> None:
        validation = Validation()
        assert validation.send(Outgoing(make(17)), sent) == ID
        with pytest.raises(InvalidMessage):
            validation.send(Outgoing(make("seventeen")), sent)

    def test_validators_of_a_model_run_again_after_a_change(self) -> None:
        model = Model(number=1)
        for number in (13, 100):
            model.number = number
            with pytest.raises(InvalidMessage, match="Model cannot be sent, as no receiver could read it"):
                Validation().send(Outgoing(model), sent)

    async def test_a_check_refuses_by_raising_or_by_returning_false(self) -> None:
        def positive(struct: Struct) -> None:
            if struct.number < 0:
                raise ValueError(f"{struct.number} is below 0")

        for check in (positive, lambda struct: struct.number >= 0):
            validation = Validation({Struct: check})
            assert validation.send(Outgoing(Struct(0)), sent) == ID
            assert await validation.handle(incoming(Struct(0)), handled) == "result"
            with pytest.raises(InvalidMessage, match="Struct is refused"):
                validation.send(Outgoing(Struct(-1)), sent)
            with pytest.raises(InvalidMessage, match="Struct is refused"):
                await validation.handle(incoming(Struct(-1)), handled)

    def test_checks_of_base_classes_apply_and_checks_of_other_classes_do_not(self) -> None:
        checked: list[str] = []
        validation = Validation(
            {
                Limited: lambda _: checked.append("limited"),
                Struct: lambda _: checked.append("struct"),
                Attrs: lambda _: checked.append("attrs"),
            }
        )
        for _ in range(2):
            validation.send(Outgoing(Limited()), sent)
            validation.send(Outgoing(Struct()), sent)
        assert checked == ["limited", "struct", "struct"] * 2

    async def test_every_message_of_a_list_is_checked(self) -> None:
        validation = Validation({Struct: lambda struct: struct.number < 2})
        assert await validation.handle(incoming([Struct(0), Struct(1)]), handled) == "result"
        with pytest.raises(InvalidMessage):
            await validation.handle(incoming([Struct(0), Struct(2)]), handled)

    def test_invalid_check_is_refused(self) -> None:
        checks: Any = {Struct: "positive"}
        with pytest.raises(InvalidSetting, match="give a mapping of a class to a function"):
            Validation(checks)
        checks = {"middlewares.struct": print}
        with pytest.raises(InvalidSetting, match="give a mapping of a class to a function"):
            Validation(checks)


class TestLogging:
    def told(self, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, dict[str, Any]]]:
        """Level, event and fields of each line."""
        fields = [dict(vars(record)["durable"]) for record in caplog.records]
        return [(record.levelno, each.pop("event"), each) for record, each in zip(caplog.records, fields, strict=True)]

    def test_a_send_is_told_with_its_cause(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        parent = envelope()
        Logging().send(Outgoing(Struct(4711), "event", caused_by=parent), sent)
        Logging().send(Outgoing(Struct(4711)), lambda _: None)
        (level, event, fields), (_, dropped, _) = self.told(caplog)
        assert (level, event, dropped) == (logging.INFO, "sent", "dropped")
        assert fields.pop("ms") >= 0
        assert fields == {"type": "middlewares.struct", "kind": "event", "id": ID, "cause": parent.id}
        assert "4711" not in caplog.text

    def test_refused_send_is_a_warning_without_the_text_of_the_error(self, caplog: pytest.LogCaptureFixture) -> None:
        def refuse(_: Outgoing) -> UUID | None:
            raise InvalidMessage("the number 4711 is taken")

        with pytest.raises(InvalidMessage):
            Logging().send(Outgoing(Struct()), refuse)
        ((level, event, fields),) = self.told(caplog)
        assert (level, event, fields["error"]) == (logging.WARNING, "refused", "InvalidMessage")
        assert "4711" not in caplog.text

    async def test_each_message_of_a_list_has_its_line(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        contexts = context(), context(attempt=3)
        assert await Logging().handle(incoming([Struct(), Struct()], *contexts), handled) == "result"
        told = self.told(caplog)
        assert [(event, each["id"], each["attempt"]) for _, event, each in told] == [
            ("handled", contexts[0].id, 1),
            ("handled", contexts[1].id, 3),
        ]
        assert all(each["handler"] == "shop.handle" for _, _, each in told)

    async def test_component_uses_the_given_logger_and_level(self, caplog: pytest.LogCaptureFixture) -> None:
        quiet = Logging(logging.getLogger("shop"), level=logging.DEBUG)
        caplog.set_level(logging.INFO, "shop")
        await quiet.handle(incoming(Struct()), handled)
        assert caplog.records == []
        caplog.set_level(logging.DEBUG, "shop")
        await quiet.handle(incoming(Struct()), handled)
        assert [(record.name, record.levelno) for record in caplog.records] == [("shop", logging.DEBUG)]


class TestChaos:
    @staticmethod
    def history(seed: int, **chances: Any) -> list[object]:
        """What became of a hundred sends: how often each called the rest, and what it raised."""
        chaos = Chaos(seed=seed, **chances)
        made: list[object] = []
        for _ in range(100):
            calls: list[Outgoing] = []

            def count(outgoing: Outgoing, calls: list[Outgoing] = calls) -> UUID | None:
                calls.append(outgoing)
                return ID

            try:
                made.append((chaos.send(Outgoing("message"), count), len(calls)))
            except ChaosError as error:
                made.append((str(error), len(calls)))
        return made

    def test_seed_determines_the_history(self) -> None:
        chances = {"drop": 0.2, "fail": 0.2, "duplicate": 0.2}
        assert self.history(1, **chances) == self.history(1, **chances)
        assert self.history(1, **chances) != self.history(2, **chances)

    def test_each_mishap_has_the_effect_of_its_name(self) -> None:
        assert set(self.history(1)) == {(ID, 1)}
        assert set(self.history(1, drop=1)) == {(None, 0)}
        assert set(self.history(1, duplicate=1)) == {(ID, 2)}
        assert set(self.history(1, fail=1)) == {("chaos, early", 0), ("chaos, late", 1)}

    async def test_mishaps_can_be_limited_to_one_side(self) -> None:
        assert Chaos(drop=1, only="handle").send(Outgoing("message"), sent) == ID
        assert Chaos(drop=1, only="send").send(Outgoing("message"), sent) is None
        assert await Chaos(drop=1, only="send").handle(incoming("message"), handled) == "result"
        assert await Chaos(drop=1, only="handle").handle(incoming("message"), handled) is None

    def test_given_delay_is_kept(self) -> None:
        delays: list[object] = []

        def look(outgoing: Outgoing) -> UUID | None:
            delays.append(outgoing.options.get("delay"))
            return ID

        chaos = Chaos(delay=1, longest_delay=5)
        chaos.send(Outgoing("message", options={"delay": 60}), look)
        chaos.send(Outgoing("message", options={"at": datetime(2024, 2, 29, tzinfo=UTC)}), look)
        chaos.send(Outgoing("message"), look)
        assert delays[:2] == [60, None]
        assert isinstance(delays[2], float)
        assert 0 <= delays[2] <= 5

    @pytest.mark.parametrize("wrong", [{"fail": 1.1}, {"drop": -0.1}, {"longest_delay": -1}, {"only": "sending"}])
    def test_invalid_chance_is_refused(self, wrong: Any) -> None:
        with pytest.raises(InvalidSetting, match="Chaos"):
            Chaos(**wrong)
