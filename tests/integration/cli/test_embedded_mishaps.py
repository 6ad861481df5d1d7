"""Private servers in trouble: killed on their way, on odd folders, started by several, left by forked children."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from durable.embedded import Embedded, __main__, postgres, rabbitmq
from durable.embedded.cluster import MARK
from durable.embedded.ownership import changing
from durable.embedded.processes import is_served, postmaster
from durable.embedded.rabbitmq import find_scripts
from durable.embedded.server import Server
from durable.embedded.sockets import _prefix
from durable.errors import InvalidSetting
from tests.support.containers import docker_answers

MODULE = sys.modules["durable.embedded.postgres"]  # its package has a function of this name


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as made:
        yield Path(made)


def answers(server: Embedded) -> bool:
    with psycopg.connect(server.url("shop")) as conn:
        return conn.execute("SELECT current_database()").fetchone() == ("shop",)


def running(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


# ---------------------------------------------------------------- several at once


def test_database_is_created_once_when_several_ask(folder: Path) -> None:
    failed = list[BaseException]()
    creating = "SELECT count(*) = 3 FROM pg_stat_activity WHERE query ~ '^CREATE' AND wait_event_type = 'Lock'"
    with postgres(folder) as server:

        def ask() -> None:
            try:
                server.url("shop")
            except BaseException as error:
                failed.append(error)

        asking = [threading.Thread(target=ask) for _ in range(3)]
        with psycopg.connect(server.uri()) as held, psycopg.connect(server.uri(), autocommit=True) as watching:
            held.execute("LOCK pg_database IN SHARE MODE")
            for thread in asking:
                thread.start()
            assert within(30, lambda: watching.execute(creating).fetchone() == (True,))
        for thread in asking:
            thread.join()
        assert failed == []
        assert answers(server)


def test_command_takes_over_when_the_joined_owner_ends_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """if True:
        import sys
        from durable.embedded import postgres
        with postgres(sys.argv[1]):
            print("up", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    url, owned = Embedded.url, list[bool]()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert line_of(owner) == "up"

        def url_after_the_owner(server: Embedded, database: str) -> str:
            owner.communicate()
            owned.append(server.owned)
            return url(server, database)

        monkeypatch.setattr(Embedded, "url", url_after_the_owner)
        monkeypatch.setattr(__main__, "_runs_until_asked", lambda _: True)
        assert __main__.main([str(folder), "shop"]) == 0
    assert owned == [False, True]
    assert "/shop?host=" in capfd.readouterr().out


def test_database_of_an_ended_server_is_refused(folder: Path) -> None:
    with postgres(folder) as server:
        server.server.stop()
        with pytest.raises(InvalidSetting, match="its server has ended; start it again"):
            server.url("shop")


def test_slow_end_of_the_owner_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "START_SECONDS", 0.2)
    begun = threading.Event()

    def end_slowly() -> None:
        with changing(folder):
            begun.set()
            time.sleep(1)

    ending = threading.Thread(target=end_slowly)
    ending.start()
    begun.wait(10)
    with postgres(folder) as server:
        assert server.owned
    ending.join()


def test_endless_start_of_another_process_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable.embedded.ownership.LOCK_SECONDS", 0.2)
    told = rf"folder='{folder}': process {os.getpid()} has been starting or ending its server for 0 s"
    with changing(folder), pytest.raises(InvalidSetting, match=told), postgres(folder):
        pass


# ---------------------------------------------------------------- folders

ODD = ("a b", "a'b", 'a"b', "a$HOME", "a`id`", "a&b;c", "a%41?b=1#c", "a,b", "a:b", "a\\b", "ä", "x" * 120, "a[b]*")


@pytest.mark.parametrize("name", ODD)
def test_folder_with_any_printable_name_is_used(folder: Path, name: str) -> None:
    with postgres(folder / name) as server:
        told = server.url("shop")
        server.restart()
        assert server.url("shop") == told
        assert answers(server)
        sockets = postmaster(server.server.data)
        with postgres(folder / name) as joined:
            assert joined.url("shop") == told
    assert sockets is not None
    assert not sockets.sockets.exists()
    assert [path.name for path in folder.iterdir()] == [name]


def test_folder_removed_while_its_server_runs_is_left_in_peace(folder: Path) -> None:
    with postgres(folder / "shop") as server:
        server.url("shop")
        shutil.rmtree(folder / "shop")
    assert not is_served(server.server.data)


@pytest.mark.parametrize("survivor", ["keeper", "nobody"])
def test_socket_directory_of_an_owner_killed_on_its_way_is_removed(folder: Path, survivor: str) -> None:
    program = """if True:
        import os, signal, sys
        import psutil
        from durable.embedded import postgres
        from durable.embedded.server import Server

        def die(*_):
            if sys.argv[2] == "nobody":
                for child in psutil.Process().children():
                    child.kill()
            os.kill(os.getpid(), signal.SIGKILL)

        Server.run = die
        postgres(sys.argv[1]).__enter__()
    """
    with running(program, str(folder / "a b"), survivor) as owner:
        owner.wait(60)
    data = (folder / "a b" / "data").resolve()

    def left() -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"{_prefix(data)}*"))

    if survivor == "nobody":
        assert len(left()) == 1
        with postgres(folder / "a b"):
            assert len(left()) == 1
    assert within(30, lambda: left() == [])


def test_socket_directory_of_a_killed_owner_is_removed(folder: Path) -> None:
    program = """if True:
        import sys, time
        from durable.embedded import postgres
        with postgres(sys.argv[1]) as server:
            print("up", flush=True)
            time.sleep(60)
    """
    with running(program, str(folder / "a b")) as owner:
        assert line_of(owner) == "up"
        found = postmaster(folder / "a b" / "data")
        assert found is not None
        assert found.sockets.is_dir()
        owner.kill()
    assert within(30, lambda: not found.sockets.exists())


def test_database_with_any_name_is_reached(folder: Path) -> None:
    with postgres(folder) as server:
        for name in ("a b", "a?b=1&c#d", "a/b%41", "ä'\""):
            with psycopg.connect(server.url(name)) as conn:
                assert conn.execute("SELECT current_database()").fetchone() == (name,)
        for none in ("", "a\0b", None):
            with pytest.raises(InvalidSetting, match=r"database=.*: give a name"):
                server.url(none)  # type: ignore[arg-type]


def lay(path: Path, text: str | None) -> None:
    """Write this file, or make this folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("data/PG_VERSION", "16\n", "its data are of Postgres 16, not 18"),
        ("data/PG_VERSION", "x\n", "data/PG_VERSION has no version"),
        ("data/PG_VERSION", "", "data/PG_VERSION has no version"),
        ("data/PG_VERSION", None, "cannot be used: OSError: .* it is no file"),
        ("data/customers.csv", "", "its data cannot be made: data/customers.csv is in the way"),
        ("data/postmaster.pid", None, "its data/postmaster.pid cannot be removed"),
        ("data", "", "cannot be used: NotADirectoryError"),
        ("lock", None, "its file 'lock' cannot be opened: Is a directory"),
        ("owner", None, "its file 'owner' cannot be opened: Is a directory"),
    ],
)
def test_folder_with_something_else_is_refused_and_kept(
    folder: Path, name: str, text: str | None, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lay(folder / name, text)
    if name in ("data/PG_VERSION", "data/postmaster.pid"):
        lay(folder / "data" / MARK, "")
    with pytest.raises(InvalidSetting, match=told), postgres(folder, version=18):
        pass
    assert (folder / name).exists()
    assert __main__.main([str(folder), "shop"]) == 2
    assert capfd.readouterr().err.startswith(f"error: postgres: folder='{folder}'")


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\x1bb", "a\x7fb"], ids=["nul", "newline", "escape", "delete"])
@pytest.mark.parametrize("start", [postgres, rabbitmq], ids=["postgres", "rabbitmq"])
def test_path_with_a_control_character_is_refused(folder: Path, name: str, start: Callable[..., object]) -> None:
    if start is rabbitmq:
        installed()
    with pytest.raises(InvalidSetting, match=r"a path with '.*' cannot be used; give another"):
        start(folder / name).__enter__()  # type: ignore[attr-defined]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("version", [17, "x", 0])
def test_version_without_a_wheel_is_refused(folder: Path, version: int) -> None:
    with pytest.raises(InvalidSetting, match=rf"version={version!r}: the wheel has the versions .*16.* 18"):
        postgres(folder, version=version).__enter__()


# ---------------------------------------------------------------- what was killed


def end_everything_of(folder: Path, owner: subprocess.Popen[str]) -> None:
    """Kill the owner, what it has started, and what these have started, all at once."""
    owner.send_signal(signal.SIGSTOP)
    for process in psutil.Process(owner.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    owner.kill()
    owner.wait()
    assert within(30, lambda: not is_served(folder / "data"))


def test_start_after_a_killed_initdb_makes_the_data_anew(folder: Path) -> None:
    program = "import sys; from durable.embedded import postgres; postgres(sys.argv[1]).__enter__()"
    for file in ("pg_wal", "PG_VERSION", "global/pg_control", "base/5"):
        with running(program, str(folder)) as owner:
            assert within(30, (folder / "data.durable-new" / file).exists)
            end_everything_of(folder, owner)
        assert not (folder / "data").exists(), file
    with postgres(folder) as server:
        assert answers(server)
    assert not (folder / "data.durable-new").exists()


def busy(server: Embedded) -> psutil.Process:
    """Let a process of the server work; return it."""

    def work() -> None:
        with contextlib.suppress(psycopg.Error), psycopg.connect(server.uri()) as conn:
            conn.execute("SELECT pg_backend_pid()")
            pid.append(conn.info.backend_pid)
            conn.execute("SELECT count(*) FROM generate_series(1, 20000000000) AS n WHERE n % 7 = 3")

    pid = list[int]()
    threading.Thread(target=work, daemon=True).start()
    assert within(10, lambda: bool(pid))
    backend = psutil.Process(pid[0])
    assert within(10, lambda: backend.cpu_times().user > 0.05)
    return backend


def works(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def kill_postmaster(server: Embedded) -> None:
    assert server.server.pid is not None
    os.kill(server.server.pid, signal.SIGKILL)
    assert within(10, lambda: not server.is_running)


@pytest.mark.parametrize("hidden", ["durable.embedded.processes.server_name", "psutil.Process.cwd"])
def test_process_outliving_its_server_is_ended(folder: Path, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres(folder) as server:
        backend = busy(server)
        monkeypatch.setattr(hidden, lambda _: "another")
        kill_postmaster(server)
        assert works(backend)
        server.restart()
        assert not works(backend)
        assert answers(server)


def test_end_of_the_block_ends_a_process_outliving_its_server(folder: Path) -> None:
    with postgres(folder) as server:
        backend = busy(server)
        kill_postmaster(server)
    assert not works(backend)
    with postgres(folder) as server:
        assert answers(server)


def test_failed_start_shows_the_log_of_the_server(folder: Path) -> None:
    with postgres(folder) as server:
        log = server.server.data / "log"
        told = log.read_text()
    (folder / "data" / "global" / "pg_control").unlink()
    with pytest.raises(
        InvalidSetting, match=r"mend what its log says, and start it again:\n(.|\n)*pg_control"
    ) as raised:
        postgres(folder).__enter__()
    assert not told or told not in str(raised.value)


class BodyError(Exception):
    """An error of the application."""


def test_killed_server_is_stopped(folder: Path) -> None:
    with postgres(folder) as server:
        kill_postmaster(server)
        server.restart()
        assert answers(server)
        kill_postmaster(server)
    assert not server.is_running
    with pytest.raises(BodyError), postgres(folder) as server:  # noqa: PT012
        kill_postmaster(server)
        raise BodyError


def test_error_of_the_block_is_raised_when_its_server_does_not_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Server) -> None:
        monkeypatch.undo()
        raise InvalidSetting("it does not stop")

    with pytest.raises(BodyError), postgres(folder) as server:  # noqa: PT012
        monkeypatch.setattr(Server, "stop", refuse)
        raise BodyError
    assert "embedded Postgres has not ended" in caplog.text
    assert not is_served(server.server.data)


# ---------------------------------------------------------------- forked children

LEFT_BY_A_CHILD = """if True:
    import os, sys
    from durable.embedded import postgres, rabbitmq
    from durable.embedded.rabbitmq import accepts_amqp
    with {start}(sys.argv[1]) as server:
        if not (child := os.fork()):
            sys.exit(0)
        os.waitpid(child, 0)
        print({answers}, flush=True)
"""


def test_server_outlives_a_forked_child_leaving_the_block(folder: Path) -> None:
    with running(LEFT_BY_A_CHILD.format(start="postgres", answers="server.is_running"), str(folder / "a b")) as owner:
        assert line_of(owner) == "True"
        assert owner.wait(60) == 0
    assert not is_served(folder / "a b" / "data")


def test_forked_child_restarts_no_server(folder: Path) -> None:
    program = """if True:
        import os, sys
        from durable.embedded import postgres
        with postgres(sys.argv[1]) as server:
            if not (child := os.fork()):
                try:
                    server.restart()
                except Exception as error:
                    print(error, server.owned, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
    """
    with running(program, str(folder)) as owner:
        assert line_of(owner).endswith("restart() is for its owner False")


def installed() -> None:
    """Skip where Docker stands in for the package of RabbitMQ."""
    try:
        find_scripts()
    except InvalidSetting as error:
        if docker_answers():
            pytest.skip(str(error))
        raise


def test_broker_outlives_a_forked_child_leaving_the_block(folder: Path) -> None:
    installed()
    program = LEFT_BY_A_CHILD.format(start="rabbitmq", answers="accepts_amqp('127.0.0.1', server.port)")
    with running(program, str(folder)) as owner:
        assert line_of(owner) == "True"
        assert owner.wait(60) == 0


def test_forked_process_keeps_no_broker_alive(folder: Path) -> None:
    installed()
    program = """if True:
        import os, sys, time
        from durable.embedded import rabbitmq
        with rabbitmq(sys.argv[1]) as broker:
            if not (child := os.fork()):
                time.sleep(600)
                os._exit(0)
            print(child, broker.pid, flush=True)
            time.sleep(600)
    """
    with running(program, str(folder)) as owner, contextlib.ExitStack() as ending:
        child, broker = map(int, line_of(owner).split())
        ending.callback(os.kill, child, signal.SIGKILL)
        machine = psutil.Process(broker)
        owner.kill()
        assert within(30, lambda: not works(machine))


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b'])
def test_folder_beyond_the_use_of_the_broker_is_refused(folder: Path, name: str) -> None:
    installed()
    with pytest.raises(InvalidSetting, match=r"rabbitmq: folder=.*: a path with .* cannot be used"):
        rabbitmq(folder / name).__enter__()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("name", "told"), [("", "cannot be made"), ("rabbitmq.conf", "cannot be used: IsADirectory")])
def test_file_in_the_place_of_a_brokers_folder_is_refused(folder: Path, name: str, told: str) -> None:
    installed()
    lay(folder / "broker" / name, None if name else "")
    with pytest.raises(InvalidSetting, match=told):
        rabbitmq(folder / "broker").__enter__()
