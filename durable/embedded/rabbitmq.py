"""A private RabbitMQ from the machine's `rabbitmq-server`, for tests, the demo and a first try.

It listens on 127.0.0.1 only, on ports that were free; everything that it writes is in its folder; it ends with the
block, or with the process that started it:

    this process ── standard input ──> Erlang VM, node durable@localhost
                                         ├── AMQP                 127.0.0.1:port      <── clients
                                         └── Erlang distribution  127.0.0.1:port + 1  <── rabbitmqctl

The VM reads an Erlang shell's commands from its standard input. None ever come, but the end of input halts the VM,
and that is how it notices that this process is gone. Nodes find each other by port: epmd, which would give a name to
one node of the machine only and outlive it, is not needed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from durable.embedded.folders import made
from durable.embedded.forks import hold, let_go
from durable.embedded.ports import free_port
from durable.errors import InvalidSetting, WiringError, said

NODE = "durable@localhost"
START_SECONDS = 60.0
STOP_SECONDS = 15.0
CONTROL_SECONDS = 60.0
MEMORY = "1GB"
REFUSED = " '\""  # in the path of its folder: its scripts take it apart there
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"
CONFIGURATION = f"""\
log.console = false
vm_memory_high_watermark.absolute = {MEMORY}
disk_free_limit.absolute = 10MB
"""


class Broker:
    """Private broker for tests, with faults on demand. Every call blocks until its effect has happened."""

    def __init__(self, folder: Path, scripts: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/"
        self._scripts = scripts
        self._environment = _environment(folder, port)
        self._process: subprocess.Popen[bytes] | None = None
        self._alarmed = False

    @property
    def pid(self) -> int | None:
        """The process id of the Erlang VM; None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it on its folder and ports, unless it runs; it accepts AMQP connections then (about 4 seconds).

        Raises InvalidSetting, with the end of the log, when it does not within a minute.
        """
        if self.pid is not None:
            return
        self.kill()
        self._alarmed = False
        with (self.folder / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                [self._scripts / "rabbitmq-server"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is meant for this process, which ends the broker
            )
        assert self._process.stdin is not None
        hold(self._process.stdin)  # a forked process with a copy would keep the VM alive
        deadline = time.monotonic() + START_SECONDS
        while not accepts_amqp("127.0.0.1", self.port):
            if self.pid is None or time.monotonic() > deadline:
                self.kill()
                raise InvalidSetting(f"the private RabbitMQ did not start; its log ends with:\n{self._log_end()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the broker in good order: it closes the connections and writes its memory to disk (about a second)."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Stop it as an operator would, and start it again: what is durable is kept."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the broker: connections stay open, and no request is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after pause()."""
        self._signal(signal.SIGCONT)

    def memory_alarm(self, on: bool) -> None:
        """Set the memory alarm. While it is on, the broker blocks connections that publish; those that only consume go
        on.
        """
        self._alarmed = True  # a command that is not answered in time may have been carried out
        self.control("set_vm_memory_high_watermark", *(["0"] if on else ["absolute", MEMORY]))
        self._alarmed = on

    def recover(self) -> None:
        """Undo every fault: the broker runs, is not paused, and has no alarm."""
        self.resume()
        self.start()
        if self._alarmed:
            self.memory_alarm(False)

    def settle(self) -> None:
        """Write the metadata that RabbitMQ keeps in memory for up to two seconds: its queues, exchanges and bindings.

        Confirmed messages are on disk. But kill() makes it forget a queue that is younger than that, with its messages;
        and a quorum queue may come back empty, without a leader.
        """
        self.control("eval", "mnesia:sync_log(), [dets:sync(Table) || Table <- dets:all()].")

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` with these arguments (about half a second), and return its output."""
        command = [str(self._scripts / "rabbitmqctl"), "--quiet", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CONTROL_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise WiringError(f"rabbitmqctl {arguments[0]} timed out: no end in {CONTROL_SECONDS:g} seconds") from error
        if done.returncode:
            raise WiringError(f"rabbitmqctl {arguments[0]} failed: {done.stderr or done.stdout}")
        return done.stdout

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        self._signal(number)
        self._signal(signal.SIGCONT)  # a frozen process would see nothing but SIGKILL
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            let_go(self._process.stdin)
            self._process.stdin.close()
        self._process = None

    def _log_end(self) -> str:
        logs = [self.folder / "console.log", self.folder / "rabbit.log"]
        return "\n".join(
            line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()[-30:]
        )


@contextmanager
def rabbitmq(folder: Path | str) -> Iterator[Broker]:
    """Start a private broker that keeps its data in `folder`; stop it at the end.

    Raises InvalidSetting when RabbitMQ is not installed, does not start, or cannot use the folder.
    """
    scripts = find_scripts()
    broker = Broker(made("rabbitmq", folder, refused=REFUSED), scripts, free_port())
    _check_writers(broker.folder)
    try:
        _write_configuration(broker.folder)
    except OSError as error:
        raise InvalidSetting(f"rabbitmq: folder={str(folder)!r} cannot be used: {said(error)}") from error
    owner = os.getpid()
    try:
        broker.start()
        yield broker
    finally:
        if os.getpid() == owner:  # the broker of a forked process is its parent's
            broker.stop()


def find_scripts() -> Path:
    """The folder of RabbitMQ's scripts; those that its package puts on PATH would switch to a system user first.

    Raises InvalidSetting, which says how to install it, when there is none.
    """
    server = shutil.which("rabbitmq-server", path=f"/usr/lib/rabbitmq/bin:{os.environ.get('PATH', os.defpath)}")
    if server is None or shutil.which("erl") is None:
        raise InvalidSetting(
            "RabbitMQ is not installed; on Debian and Ubuntu: sudo RUNLEVEL=1 apt-get install rabbitmq-server"
            " (RUNLEVEL=1 keeps the package from starting a broker of its own)"
        )
    return Path(server).parent


def accepts_amqp(host: str, port: int) -> bool:
    """True when a broker there answers to the protocol header."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1) as connection:
        connection.sendall(PROTOCOL_HEADER)
        return connection.recv(1) == METHOD_FRAME
    return False


def _check_writers(folder: Path) -> None:
    """Raise InvalidSetting when another user could lead root from this folder to any file, by links."""
    found = folder.stat()
    if os.geteuid() == 0 and (found.st_uid != 0 or found.st_mode & stat.S_IWOTH):
        raise InvalidSetting(
            f"rabbitmq: folder={str(folder)!r}: other users than root can write there, and lead root to other files;"
            " start it as the owner of the folder, or give another folder"
        )


def _write_configuration(folder: Path) -> None:
    (folder / "rabbitmq.conf").write_text(CONFIGURATION)
    (folder / "environment.conf").write_text("")
    cookie = folder / ".erlang.cookie"
    if not cookie.exists():
        cookie.touch(mode=0o600)
        cookie.write_text(secrets.token_hex(16))


def _environment(folder: Path, port: int) -> dict[str, str]:
    """The whole environment: nothing that is set for another broker of this machine gets in."""
    by_port = f"-start_epmd false -erl_epmd_port {port + 1}"
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(folder),  # of the Erlang cookie
        "RABBITMQ_NODENAME": NODE,
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(port + 1),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "environment.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "feature_flags"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder),
        "RABBITMQ_LOGS": str(folder / "rabbit.log"),
        "ERL_CRASH_DUMP_SECONDS": "0",
        # The shell on standard input; and the script turns into the VM, so that its pid is the broker's.
        "RABBITMQ_ALLOW_INPUT": "true",
        # A node that has its name from the beginning does not look for epmd.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-sname {NODE} {by_port} +S 2:2"
        " -kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CTL_ERL_ARGS": f"{by_port} -dist_listen false +S 1:1",
    }
