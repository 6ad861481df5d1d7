"""Settings: what is read from where, in which units, and what is refused with which words."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable import Bus, Retry, database_url, kinds, message
from durable.arguments import annotations_of
from durable.errors import InvalidMessage, InvalidSetting
from durable.setting_options import SettingOptions
from durable.settings import Settings, load_settings
from scripts.docs.settings_page import render

PEER = "tcp://127.0.0.1:2302"


@message("settings.unhandled")
@dataclass
class Unhandled:
    number: int = 1


async def handle_unhandled(message: Unhandled) -> None: ...


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"DURABLE_{name.upper()}", raising=False)


def test_every_setting_has_a_description_and_a_valid_default() -> None:
    assert all(field.description for field in Settings.model_fields.values())
    defaults = {name: field.default for name, field in Settings.model_fields.items() if field.default is not None}
    assert load_settings(**defaults) == load_settings()


def test_environment_is_read_and_arguments_in_code_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_BATCH_SIZE", "50")
    monkeypatch.setenv("DURABLE_POOL_SIZE", "3")

    settings = load_settings(batch_size=7)

    assert (settings.batch_size, settings.pool_size) == (7, 3)


def test_files_of_variables_and_of_secrets_are_read(tmp_path: Path) -> None:
    variables, secrets = tmp_path / ".env", tmp_path / "secrets"
    variables.write_text("DURABLE_BATCH_SIZE=50")
    secrets.mkdir()
    (secrets / "durable_pool_size").write_text("3")

    settings = Settings(_env_file=variables, _secrets_dir=secrets)  # type: ignore[call-arg]  # of pydantic-settings

    assert (settings.batch_size, settings.pool_size) == (50, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", timedelta(seconds=30)),
        ("0.5", timedelta(milliseconds=500)),
        ("PT30S", timedelta(seconds=30)),
        ("P7D", timedelta(days=7)),
        ("00:01:00", timedelta(minutes=1)),
    ],
)
def test_a_duration_is_seconds_or_iso_8601(text: str, expected: timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_SEND_TIMEOUT", text)

    assert load_settings().send_timeout == expected
    assert load_settings(send_timeout=text).send_timeout == expected


@given(st.integers(min_value=1, max_value=10**6))
def test_seconds_mean_the_same_as_a_number_and_as_text(seconds: int) -> None:
    assert load_settings(send_timeout=seconds) == load_settings(send_timeout=str(seconds))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 1_001),
        ("batch_size", "many"),
        ("pool_size", -1),
        ("send_timeout", 0),
        ("send_timeout", "-1"),
        ("send_timeout", "nan"),
        ("send_timeout", "inf"),
        ("send_timeout", "soon"),
        ("db_schema", 'a";drop'),
        ("db_schema", "Durable"),
        ("db_schema", ""),
        ("db_schema", "pg_durable"),
        ("db_schema", "a" * 64),
    ],
)
def test_invalid_value_is_refused_with_the_name_of_its_setting(name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=f"^{name}: "):
        load_settings(**{name: value})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_message_bytes": 100_000, "max_frame_bytes": 100_000}, "max_message_bytes.*max_frame_bytes"),
        ({"heartbeat_interval": 2, "heartbeat_stale": 5}, "heartbeat_stale"),
        ({"dedupe_window": 3_599}, "dedupe_window"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        load_settings(**settings)


def test_an_unknown_setting_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match=r"^batchsize: unknown setting; did you mean 'batch_size'\?"):
        load_settings(batchsize=5)
    monkeypatch.setenv("DURABLE_PING_INTERVALL", "5")
    with pytest.raises(
        InvalidSetting, match=r"^DURABLE_PING_INTERVALL: unknown setting; did you mean 'DURABLE_PING_INTERVAL'\?"
    ):
        load_settings()


def test_unknown_variables_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_FAILPOINT", "C1")
    monkeypatch.setenv("DURABLE_TEST_SOMETHING", "x")

    load_settings()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@host:5432/name",
        "postgresql+asyncpg://user@host/name",
        "postgresql+psycopg://user@host/name?sslmode=require",
        "postgresql://postgres:@/name?host=/tmp/sockets",
        "postgresql:///name",
    ],
)
def test_a_postgres_url_is_taken(url: str) -> None:
    database_url.parse(url)


@pytest.mark.parametrize(
    "url",
    ["", "postgres", "mysql://user@host/name", "sqlite:///file", "postgresql+psycopg2://user@host/name", "http://x"],
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^database_url: "):
        load_settings(database_url=url)


def test_a_secret_shows_in_no_repr_and_in_no_refusal() -> None:
    settings = load_settings(database_url="postgresql://user:s3cret@host/name")
    assert "s3cret" not in repr(settings)

    with pytest.raises(InvalidSetting) as refusal:
        load_settings(database_url="mysql://user:s3cret@host/name")
    assert "s3cret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shared_secret", "hunter2"),
        ("previous_shared_secret", "hunter2"),
        ("peers", {"billing": "hunter2"}),
        ("peers", '{"billing": "hunter2"}'),
        ("peers", {"billing": {"secrets": {"1": "hunter2"}}}),
    ],
)
def test_short_secret_is_refused_without_being_shown(name: str, value: object) -> None:
    with pytest.raises(InvalidSetting, match=f"^{name}: a secret must have at least 16 characters .has 7.;") as refused:
        load_settings(**{name: value})
    assert "hunter2" not in str(refused.value)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().batch_size = 5


# ------------------------------------------------------------------ the page


def test_page_of_settings_shows_the_defaults() -> None:
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    shown = {row[0].strip("| `"): row[2].strip("`") for row in rows}

    assert shown.keys() == Settings.model_fields.keys()
    given = {name: value for name, value in shown.items() if value != "none"}
    assert load_settings(**given) == load_settings()


# ------------------------------------------------------------------ those of several values


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1s,10s,1m", [1, 10, 60]),
        ("1, 10, 60", [1, 10, 60]),
        ('["1s", 10, "PT1M"]', [1, 10, 60]),
        ("", []),
        ([1, "10s", timedelta(minutes=1)], [1, 10, 60]),
        ("0", [0]),
    ],
)
def test_pauses_between_attempts_are_a_list(written: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    delays = tuple(timedelta(seconds=each) for each in expected)
    assert load_settings(retry_delays=written).retry_delays == delays
    if isinstance(written, str):
        monkeypatch.setenv("DURABLE_RETRY_DELAYS", written)
        assert load_settings().retry_delays == delays


@pytest.mark.parametrize("written", ["soon", "1s,later", "-1", [None]])
def test_invalid_retry_delay_is_refused(written: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^retry_delays: "):
        load_settings(retry_delays=written)


@pytest.mark.parametrize("name", ["busy_pause", "reconnect_pause"])
def test_first_pause_above_the_longest_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} must not be above {name}_longest"):
        load_settings(**{name: "1h"})


def test_handler_without_a_policy_uses_the_retry_settings() -> None:
    bus = Bus("a", retry_immediate=0, retry_delays="5s", retry_jitter=0, retry_max_age="1h")
    bus.handles(Unhandled)(handle_unhandled)
    handler = bus.application.handlers["settings.unhandled"]

    assert bus.application.policy(handler).retry == Retry(0, (timedelta(seconds=5),), 0, timedelta(hours=1))
    bus.configure(retry_immediate=7)
    assert bus.application.policy(handler).retry.immediate == 7
    own = Bus("a", retry_immediate=7)
    own.handles(Unhandled, retry=Retry.never())(handle_unhandled)
    assert own.application.policy(own.application.handlers["settings.unhandled"]).retry == Retry.never()


def test_limits_of_headers_are_those_of_the_settings() -> None:
    bus = Bus("a", max_headers=2, max_header_bytes=10)
    envelope_factory = bus.runtime.envelope_factory

    envelope_factory.command(Unhandled(), to=PEER, headers={"a": "b", "c": "d"})
    with pytest.raises(InvalidMessage, match="max_headers"):
        envelope_factory.command(Unhandled(), to=PEER, headers={"a": "b", "c": "d", "e": "f"})
    with pytest.raises(InvalidMessage, match="max_header_bytes"):
        envelope_factory.command(Unhandled(), to=PEER, headers={"a": "0123456789"})


# ------------------------------------------------------------------ what a refusal says


SPAN = "is no length of time; give seconds, a timedelta, or text such as '500ms', '10s', '5m'"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batch_size", "many", "give a whole number, not 'many'"),
        ("batch_size", 1.5, "give a whole number, not 1.5"),
        ("batch_size", 0, "give at least 1, not 0"),
        ("batch_size", 1_001, "give at most 1000, not 1001"),
        ("retry_jitter", "x", "give a number, not 'x'"),
        ("retry_jitter", 1, "give less than 1.0, not 1"),
        ("validate_sent", "maybe", "give true or false, not 'maybe'"),
        ("poll_interval", "soon", f"'soon' {SPAN}"),
        ("poll_interval", None, f"None {SPAN}"),
        ("poll_interval", 0, "give a time above 0, not 0"),
        ("poll_interval", "400000d", "give a time from 0 to 36500 days, not '400000d'"),
        ("retry_delays", "1s,later", f"'later' {SPAN}"),
        ("retry_delays", -1, "give a list, not -1"),
        ("db_schema", "Durable", "give lower-case letters, digits and '_', 63 characters at most"),
        ("pooler", "x", "give 'auto', 'none' or 'transaction', not 'x'"),
        ("metrics_host", "", "give a name, not ''"),
        ("lake", 1, "give text, not 1"),
        ("tls_ca", 1, "give the path of a file, not 1"),
        ("answer_to", 7, "give a list, not 7"),
        ("answer_to", "orders", "'orders' is no address; give a list of addresses, such as tcp://127.0.0.1:2303, or *"),
        ("answer_to", '["tcp://a:1"', "must be a JSON array"),
        ("peers", '{"a": 1}', "give each peer its secret as text, or an object of secrets, certificates, at, types"),
        ("peers", {"a": {"secret": "x"}}, "unknown name 'secret'"),
        ("peers", "[1]", "give a JSON object"),
        ("peers", {"a": {"at": ["orders"]}}, "give addresses of http://, https://, tcp:// or rabbitmq://"),
    ],
)
def test_refused_setting_is_told_in_plain_words(name: str, value: object, said: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        load_settings(**{name: value})
    assert str(refusal.value).startswith(f"{name}: {said}")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_refusal_of_a_setting_is_in_own_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [refusal(**{name: value}) for value in (object(), 10**30, -(10**30), [object()], {"a": object()}, 1.5)]
    for text in ("{", "[", '"', "", "tcp://127.0.0.1:1"):
        monkeypatch.setenv(f"DURABLE_{name.upper()}", text)
        told.append(refusal())
    assert not [text for text in told if any(word in text for word in ("Input", "String", "datetime.timedelta"))]


def refusal(**given: Any) -> str:
    try:
        load_settings(**given)
    except InvalidSetting as error:
        return str(error)
    return ""


@pytest.mark.parametrize("written", ["tcp://a:1,tcp://b:2", '["tcp://a:1", "tcp://b:2"]', ["tcp://a:1", "tcp://b:2"]])
def test_addresses_for_answers_are_a_list(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(answer_to=written).answer_to == ("tcp://a:1", "tcp://b:2")
    if isinstance(written, str):
        monkeypatch.setenv("DURABLE_ANSWER_TO", written)
        assert load_settings().answer_to == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize("name", [name for name, field in Settings.model_fields.items() if field.default in ((), {})])
def test_none_leaves_out_a_setting_with_an_empty_default(name: str) -> None:
    assert getattr(load_settings(**{name: None}), name) == Settings.model_fields[name].default


def test_variable_far_from_every_setting_has_no_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_PORT", "1")
    with pytest.raises(InvalidSetting, match=r"^DURABLE_PORT: unknown setting$"):
        load_settings()


# ------------------------------------------------------------------ as keywords


def test_keywords_of_a_bus_are_the_settings() -> None:
    options = annotations_of(SettingOptions)

    assert list(options) == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        assert kinds.fits(field.default, options[name]), name
        nothing = field.default is None or field.default in ((), {})
        assert kinds.fits(None, options[name]) == nothing, name
    assert get_type_hints(SettingOptions).keys() == options.keys()
