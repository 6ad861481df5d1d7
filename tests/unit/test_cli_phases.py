"""Bars that name what is done: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from durable.cli.output import phases


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_names_the_current_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with phases("audit") as phase:
        phase("starting Spark")
        assert "audit: starting Spark" in screen.getvalue()
        show = phase("counting rows")
        show(3, 8)
    assert "audit: counting rows" in screen.getvalue()
    assert "3/8" in screen.getvalue()


def test_bar_is_not_drawn_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with phases("audit") as phase:
        phase("counting rows")(3, 8)
    assert file.getvalue() == ""
