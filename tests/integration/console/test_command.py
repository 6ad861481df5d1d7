"""`durable-agent console`, as a process of its own."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.support.command import Agent


@pytest.fixture
def agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], database_url: str
) -> Agent:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_console_is_open_to_its_token_until_a_signal(agent: Agent, stop: signal.Signals) -> None:
    with agent.process("console", f"{agent.application()}:bus", "--port", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split(" at ")[1].strip()
        token = process.stdout.readline().decode().removeprefix("token: ").strip()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(url, headers={"authorization": "Bearer no"}).status_code == 401
        page = httpx.get(url, headers={"authorization": f"Bearer {token}"})
        assert (page.status_code, "All is well" in page.text) == (200, True)
        process.send_signal(stop)
        assert process.wait(30) in (0, 130, 143, -stop)


def test_token_of_a_file_is_not_printed(agent: Agent) -> None:
    (agent.folder / "token").write_text("a secret of a file 1\n")
    with agent.process("console", f"{agent.application()}:bus", "--port", "0", "--token-file", "token") as process:
        assert process.stdout is not None
        told = process.stdout.readline().decode()
        url = told.split(" at ")[1].strip()
        assert httpx.get(url, headers={"authorization": "Bearer a secret of a file 1"}).status_code == 200
        process.terminate()
        assert b"secret" not in process.communicate(timeout=30)[0]


def test_error_names_the_option_to_correct(agent: Agent) -> None:
    app = f"{agent.application()}:bus"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = agent("console", app, "--port", port)
        assert (ended.code, f"--port {port}: cannot listen here" in ended.err) == (2, True)
    ended = agent("console", app, "--token-file", "none")
    assert (ended.code, "--token-file none: cannot be read" in ended.err) == (2, True)
    (agent.folder / "short").write_text("short")
    ended = agent("console", app, "--token-file", "short")
    assert (ended.code, "give 16 or more" in ended.err) == (2, True)
