"""The page of all settings, reference/settings.md, made from the class: `python -m scripts.docs.settings_page`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final, get_args

from pydantic.fields import FieldInfo

from durable.settings import Settings

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
_HEAD = """\
# Settings

Each is a variable (`DURABLE_BATCH_SIZE=50`), a keyword (`Bus(..., batch_size=50)`) and a flag
(`durable-agent run app:bus --batch-size 50`). A keyword or flag comes before the variable. Unknown names are refused.
A time is seconds (`30`), text such as `500ms`, `10s`, `5m`, `1h30m` or `7d`, ISO 8601 (`PT30S`) or, in Python, a
timedelta. Which of them to look at for what: [Operations](../operations.md#settings).

durable reads no file of settings, and no `.env`. Set the variables where the process is started: by `EnvironmentFile=`
of systemd, `env_file:` of Docker Compose, or `set -a; . ./shop.env; set +a` in a shell.

| setting | unit | default | what it is, and where the default comes from |
|---|---|---|---|
"""


def render() -> str:
    return _HEAD + "".join(_row(name, field) for name, field in Settings.model_fields.items())


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_unit(name, field)} | {_default(field.default)} | {_escaped(field.description or '')} |\n"


def _unit(name: str, field: FieldInfo) -> str:
    kinds = set(_kinds(field.annotation))
    if timedelta in kinds:
        return "times" if tuple in kinds else "time"
    if "bytes" in name:
        return "bytes"
    if bool in kinds:
        return "true or false"
    if int in kinds:
        return "count"
    return "part of 1" if float in kinds else "text"


def _kinds(hint: object) -> Iterator[object]:
    yield getattr(hint, "__origin__", hint)
    for part in get_args(hint):
        yield from _kinds(part)


def _default(value: object) -> str:
    match value:
        case None:
            return "none"
        case timedelta():
            return f"`{_span(value)}`"
        case tuple() | dict() if not value:
            return "none"
        case tuple():
            return f"`{','.join(_span(each) if isinstance(each, timedelta) else str(each) for each in value)}`"
        case bool():
            return f"`{str(value).lower()}`"
        case _:
            return f"`{value}`"


def _span(value: timedelta) -> str:
    """In the largest unit that gives a whole number."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if value.total_seconds() % length == 0:
            return f"{value.total_seconds() / length:g}{unit}"
    return f"{value.total_seconds() * 1_000:g}ms"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render())
