"""The embedded servers: private to their folders, whoever else runs one on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from durable.embedded import Broker, postgres, rabbitmq
from durable.embedded.account import unprivileged
from durable.embedded.ownership import end_orphan
from durable.embedded.postgres import START_SECONDS
from durable.embedded.processes import is_served
from durable.embedded.rabbitmq import accepts_amqp, find_scripts
from durable.errors import InvalidSetting, WiringError
from tests.failure.waiting import eventually
from tests.support.broker import foreign
from tests.support.containers import docker_answers
from tests.support.servers import Names

# ---------------------------------------------------------------- Postgres


def test_server_ends_with_its_block() -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with postgres(Path(folder)) as server, psycopg.connect(server.url("shop")) as conn:
            assert conn.execute("SELECT current_database()").fetchone() == ("shop",)
            told = server.url("shop")
        with pytest.raises(psycopg.OperationalError), psycopg.connect(told):
            pass


def test_database_is_created_when_first_requested(database_url: str) -> None:
    with psycopg.connect(database_url) as conn:
        assert conn.execute("SELECT count(*) FROM durable.nodes").fetchone() == (0,)


def test_folder_of_a_server_is_created_when_missing(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="durable-pg-") as folder,
        postgres(Path(folder) / "not" / "yet") as server,
        psycopg.connect(server.url("shop")) as conn,
    ):
        assert conn.execute("SELECT 1").fetchone() == (1,)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InvalidSetting, match=r"postgres: folder='.*file/data' cannot be made"),
        postgres(tmp_path / "file" / "data"),
    ):
        pass


def test_second_block_joins_a_server_without_owning_the_process() -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with postgres(folder) as first:
            with postgres(folder) as second:
                assert (first.owned, second.owned) == (True, False)
                assert second.url("shop") == first.url("shop")
            assert first.is_running
            with psycopg.connect(first.url("shop")) as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)
        assert not first.is_running
        with postgres(folder) as third:
            assert third.owned


def embedded(folder: str, *databases: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "durable.embedded", folder, *databases],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def urls_of(started: subprocess.Popen[str], count: int) -> list[str]:
    assert started.stdout is not None
    lines = [started.stdout.readline().strip() for _ in range(count)]
    return [line.removeprefix("export DURABLE_DATABASE_URL=").strip("'") for line in lines]


def test_second_command_joins_the_server_of_the_first() -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, contextlib.ExitStack() as started:
        first = started.enter_context(embedded(folder, "orders", "billing"))
        started.callback(first.kill)
        (orders_name, orders), (billing_name, billing) = (line.split(": ", 1) for line in urls_of(first, 2))
        assert (orders_name, billing_name) == ("orders", "billing")
        assert "/orders?" in orders
        assert "/billing?" in billing
        second, third = (started.enter_context(embedded(folder, "billing")) for _ in range(2))
        started.callback(second.kill)
        started.callback(third.kill)
        assert urls_of(second, 1) + urls_of(third, 1) == [billing, billing]
        second.send_signal(signal.SIGINT)
        assert f"the server of {folder} runs on" in second.communicate(timeout=30)[1]
        with psycopg.connect(billing.strip("'")) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        first.send_signal(signal.SIGINT)
        assert first.communicate(timeout=30)[1] == f"the server of {folder} has ended\n"
        assert f"error: the server of {folder} has ended" in third.communicate(timeout=30)[1]
        assert (first.returncode, second.returncode, third.returncode) == (0, 0, 1)


def test_killed_owner_takes_its_server_along() -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, embedded(folder, "shop") as first:
        (url,) = urls_of(first, 1)
        with embedded(folder, "shop") as second:
            assert urls_of(second, 1) == [url]
            first.kill()
            assert "has ended; start it again" in second.communicate(timeout=30)[1]
            assert second.returncode == 1


def test_successor_of_a_killed_owner_has_a_server_of_its_own() -> None:
    """However soon after the kill it starts: the server of the last owner is about to end."""
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        for delay in (0.0, 0.005, 0.02, 0.06, 0.3):
            with embedded(folder, "shop") as first:
                urls_of(first, 1)
                first.kill()
            time.sleep(delay)
            began = time.monotonic()
            with postgres(folder) as successor:
                assert time.monotonic() - began < START_SECONDS
                assert successor.owned
                time.sleep(0.3)
                with psycopg.connect(successor.url("shop")) as conn:
                    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_successor_ends_a_server_without_an_owner() -> None:
    """Such as one whose owner was killed together with the shell that was to end it."""
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with embedded(folder, "shop") as first:
            urls_of(first, 1)
            (shell,) = (child for child in psutil.Process(first.pid).children() if child.name() == "sh")
            shell.kill()
            first.kill()
        left = int((Path(folder) / "data" / "postmaster.pid").read_text().split()[0])
        assert psutil.pid_exists(left)
        with postgres(folder) as successor:
            assert successor.owned
            assert successor.server.pid != left


@pytest.fixture
def foreign_process() -> Iterator[subprocess.Popen[bytes]]:
    user = unprivileged().user if os.geteuid() == 0 else None  # of whom Postgres is aware
    with subprocess.Popen(["sleep", "600"], user=user) as process:
        yield process
        process.kill()


def claim(data: Path, pid: int) -> None:
    """Leave the file of a server that was killed, with a pid that is in use again."""
    lines = [str(pid), str(data), str(int(time.time())), "5432", str(data), "", " 1 1", "ready", ""]
    (data / "postmaster.pid").write_text("\n".join(lines))
    (data / ".s.PGSQL.5432.lock").write_text("\n".join(lines[:5]))


def test_process_with_the_pid_of_a_killed_server_is_left_alone(foreign_process: subprocess.Popen[bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        data = Path(folder) / "data"
        with postgres(folder):
            pass
        claim(data, foreign_process.pid)
        with postgres(folder) as server:
            assert server.owned
            with psycopg.connect(server.url("shop")) as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)
        assert foreign_process.poll() is None


def test_process_with_the_pid_of_a_killed_server_is_no_server(foreign_process: subprocess.Popen[bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, postgres(folder) as server:
        server.server.stop()
        claim(server.server.data, foreign_process.pid)
        assert not server.is_running
        server.restart()
        assert server.is_running
        assert server.server.pid != foreign_process.pid


def test_server_of_a_killed_owner_is_ended_unless_a_successor_owns_the_folder() -> None:
    """Nobody owns a folder that was removed."""
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, postgres(folder) as server:
        end_orphan(folder, str(server.server.data))
        assert server.is_running
        end_orphan(f"{folder}/removed", str(server.server.data))
        assert not server.is_running


KILLED_ON_THE_WAY = """if True:
    import os, signal, sys, threading, time
    from pathlib import Path
    from durable.embedded import postgres

    file = Path(sys.argv[1]) / "data" / "postmaster.pid"

    def kill_owner():
        while file.exists():
            time.sleep(0.001)
        while not file.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    watch = threading.Thread(target=kill_owner, daemon=True)
    if sys.argv[2] == "start":
        watch.start()
    with postgres(sys.argv[1]) as server:
        watch.start()
        server.restart()
        time.sleep(60)
"""


@pytest.mark.parametrize("step", ["start", "restart"])
def test_owner_killed_on_the_way_takes_its_server_along(step: str) -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with postgres(folder):
            pass
        with subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED_ON_THE_WAY, folder, step]) as owner:
            assert owner.wait(60) == -signal.SIGKILL
        ends(Path(folder))


def test_owner_killed_after_a_restart_takes_its_server_along() -> None:
    program = """if True:
        import sys, time
        from durable.embedded import postgres
        with postgres(sys.argv[1]) as server:
            server.restart()
            print("restarted", flush=True)
            time.sleep(60)
    """
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        command = [sys.executable, "-W", "ignore", "-c", program, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "restarted\n"
            owner.kill()
        ends(Path(folder))


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"], ids=["leaves", "killed"])
def test_forked_process_keeps_no_server_alive(ending: str) -> None:
    program = f"""if True:
        import os, sys, time
        from durable.embedded import postgres
        with postgres(sys.argv[1]) as server:
            if not (child := os.fork()):
                time.sleep(600)
                os._exit(0)
            print(child, flush=True)
            {ending}
    """
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, contextlib.ExitStack() as ending_child:
        command = [sys.executable, "-W", "ignore", "-c", program, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            ending_child.callback(os.kill, int(owner.stdout.readline()), signal.SIGKILL)
            owner.wait(30)
        ends(Path(folder))
        with postgres(folder) as successor:
            assert successor.owned


def ends(folder: Path) -> None:
    """Wait for the end of the server of this folder."""
    deadline = time.monotonic() + 30
    while is_served(folder / "data"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Take a step with the server's pid while it starts."""

    def patch(step: Callable[[int], object]) -> None:
        def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            process = subprocess.Popen[bytes](command, **options)
            file = Path(options["cwd"]) / "postmaster.pid"
            while not file.exists() or not file.read_text():
                time.sleep(0.001)
            step(process.pid)
            return process

        monkeypatch.setattr("durable.embedded.server.Popen", started)

    return patch


def test_long_recovery_of_a_server_is_waited_for(interrupted: Callable[[Callable[[int], object]], None]) -> None:
    def recover_slowly(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1, os.kill, (pid, signal.SIGCONT)).start()

    interrupted(recover_slowly)
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, postgres(folder) as server:
        assert server.owned
        with psycopg.connect(server.url("shop")) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)


def test_end_of_a_server_in_recovery_is_told(interrupted: Callable[[Callable[[int], object]], None]) -> None:
    interrupted(lambda pid: os.kill(pid, signal.SIGKILL))
    with (
        tempfile.TemporaryDirectory(prefix="durable-pg-") as folder,
        pytest.raises(InvalidSetting, match="its server does not start: it ended with -9, and its log says nothing"),
        postgres(folder),
    ):
        pass


def test_endless_recovery_of_a_server_ends_with_its_owner(
    interrupted: Callable[[Callable[[int], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable.embedded.server.RECOVERY_SECONDS", 0.3)

    def stand_still(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(2, os.kill, (pid, signal.SIGCONT)).start()  # for it to notice that it is to end

    interrupted(stand_still)
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with pytest.raises(InvalidSetting, match="its server recovered for 0 s"), postgres(folder):
            pass
        assert not is_served(Path(folder) / "data")


def test_joined_server_is_restarted_by_its_owner_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder, postgres(folder) as first:
        with postgres(folder) as second, pytest.raises(InvalidSetting, match="restart"):
            second.restart()
        first.restart()
        assert first.is_running


def test_server_without_a_start_raises_invalid_setting() -> None:
    with tempfile.TemporaryDirectory(prefix="durable-pg-") as folder:
        with postgres(folder):
            pass
        (Path(folder) / "data" / "postgresql.conf").write_text("this is no setting")
        with (
            pytest.raises(InvalidSetting, match=r"does not start; mend .*\n(.|\n)*syntax error in file"),
            postgres(folder),
        ):
            pass


# ---------------------------------------------------------------- RabbitMQ


async def test_confirmed_messages_survive_a_kill_of_the_broker(own_broker: Broker, queue_name: Names) -> None:
    queues = {type: queue_name(type) for type in ("quorum", "classic")}
    async with foreign(own_broker.url) as client:
        for type, queue in queues.items():
            await client.declare(queue, type=type)
    own_broker.settle()
    async with foreign(own_broker.url) as client:
        for queue in queues.values():
            await client.publish(queue, b"confirmed")
    killed = own_broker.pid
    own_broker.kill()
    assert own_broker.pid is None
    own_broker.start()
    assert own_broker.pid not in (None, killed)
    async with foreign(own_broker.url) as client:
        for queue in queues.values():
            assert [message.body for message in await client.drain(queue)] == [b"confirmed"]


async def test_paused_broker_is_silent_and_keeps_its_connections(own_broker: Broker, queue_name: Names) -> None:
    async with foreign(own_broker.url) as client:
        await client.declare(queue := queue_name())
        own_broker.pause()
        assert not accepts_amqp("127.0.0.1", own_broker.port)
        own_broker.resume()
        assert accepts_amqp("127.0.0.1", own_broker.port)
        await client.publish(queue, b"on the same connection")


async def test_memory_alarm_blocks_publishers_until_cleared(own_broker: Broker, queue_name: Names) -> None:
    async with foreign(own_broker.url) as client, asyncio.TaskGroup() as tasks:
        await client.declare(queue := queue_name())

        async def publish() -> None:
            for _ in range(3):
                await client.publish(queue, b"sooner or later")

        own_broker.memory_alarm(True)
        publishing = tasks.create_task(publish(), name="publish")
        await asyncio.wait([publishing], timeout=0.5)
        assert not publishing.done()
        own_broker.memory_alarm(False)
        await publishing
        assert await client.count(queue) == 3


def test_broker_recovers_from_an_alarm_and_a_pause(own_broker: Broker) -> None:
    own_broker.memory_alarm(True)
    own_broker.pause()
    own_broker.recover()
    assert accepts_amqp("127.0.0.1", own_broker.port)
    assert "memory" not in own_broker.control("eval", "rabbit_alarm:get_alarms().")


def test_refusal_of_rabbitmqctl_raises_wiring_error(own_broker: Broker) -> None:
    with pytest.raises(WiringError, match=r"delete_queue failed: (.|\n)*not found"):
        own_broker.control("delete_queue", "no-such-queue")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a private broker; where Docker stands in for it, there may be none to test."""
    try:
        find_scripts()
    except InvalidSetting as error:
        if docker_answers():
            pytest.skip(str(error))
        raise
    return tmp_path


async def test_private_broker_is_isolated_and_leaves_no_process_behind(
    folder: Path, own_broker: Broker, queue_name: Names
) -> None:
    with rabbitmq(folder) as broker:
        async with foreign(broker.url) as client, foreign(own_broker.url) as neighbour:
            await client.declare(queue := queue_name())
            assert not await neighbour.exists(queue)
        assert queue in broker.control("list_queues", "name")
        assert queue not in own_broker.control("list_queues", "name")
        listening = [found.laddr for found in psutil.Process(broker.pid).net_connections("tcp") if not found.raddr]
        assert sorted(listening) == [("127.0.0.1", broker.port), ("127.0.0.1", broker.port + 1)]
        assert len(processes_of(folder)) > 1
    await eventually(lambda: not processes_of(folder))
    assert not accepts_amqp("127.0.0.1", broker.port)


async def test_private_broker_ends_with_its_parent_process(folder: Path) -> None:
    program = """if True:
        import pathlib, sys, time
        from durable.embedded import rabbitmq
        with rabbitmq(pathlib.Path(sys.argv[1])) as broker:
            print(broker.url, flush=True)
            time.sleep(60)
    """
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, folder, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    url = (await parent.stdout.readline()).decode().strip()
    async with foreign(url) as client:
        await client.declare("queue")
    assert processes_of(folder)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not processes_of(folder))


def test_broker_shows_the_end_of_its_log_when_its_start_fails(folder: Path) -> None:
    (folder / "advanced.config").write_text("this is no Erlang")
    with pytest.raises(InvalidSetting, match=r"its log ends with:(.|\n)*failed_to_read_advanced"), rabbitmq(folder):
        pass


def test_missing_rabbitmq_raises_with_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidSetting, match="apt-get install rabbitmq-server"), rabbitmq(tmp_path / "broker"):
        pass
    assert not (tmp_path / "broker").exists()


def processes_of(folder: Path) -> list[str]:
    """What runs with this folder as its home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found
