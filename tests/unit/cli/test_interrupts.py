"""Interrupts of a command: none is ignored, and none is logged as an error."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from durable.cli.interrupts import interrupts_kept


class Thing:
    pass


class Resource:
    def __del__(self) -> None:
        raise KeyboardInterrupt


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def drop_what_is_watched() -> None:
    thing = Thing()
    watch = weakref.ref(thing, interrupt)
    del thing
    assert watch() is None


def drop_a_resource() -> None:
    Resource()


def work_on(drop: Callable[[], None]) -> None:
    drop()
    threading.Event().wait(60)


@pytest.mark.parametrize("drop", [drop_what_is_watched, drop_a_resource])
def test_ignored_interrupt_is_raised_once_more(drop: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        work_on(drop)


def test_other_ignored_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise LookupError

    with interrupts_kept():
        Broken()
    assert told == [LookupError]


@pytest.mark.parametrize(("error", "is_logged"), [(KeyboardInterrupt(), False), (LookupError("gone"), True)])
def test_library_does_not_log_an_interrupt(
    caplog: pytest.LogCaptureFixture, error: BaseException, is_logged: bool
) -> None:
    with interrupts_kept():
        try:
            raise error
        except BaseException:
            logging.exception("while sending a command")  # noqa: LOG015  as py4j does
    assert bool(caplog.records) is is_logged


def test_hook_and_filter_are_gone_afterwards() -> None:
    before = sys.unraisablehook, list(logging.getLogger().filters)
    with interrupts_kept():
        assert (sys.unraisablehook, logging.getLogger().filters) != before
    assert (sys.unraisablehook, list(logging.getLogger().filters)) == before
