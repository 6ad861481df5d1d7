"""The process of a private Postgres, started without a shell: that would read the path of its data in its own way.

run()    ready   <── its file says so, after a recovery if the last server was killed
         failed  <── the process has ended, or recovers for too long: the end of its log says why
stop()   ended   <── asked to stop, told to end, killed: each after a time
"""

from __future__ import annotations

import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Final

from durable.embedded.account import options, way_to
from durable.embedded.folders import appended, opened
from durable.embedded.processes import end_left_behind, is_ready, postmaster, server_name
from durable.embedded.sockets import remove_sockets, url_to
from durable.embedded.wheel import Programs
from durable.errors import InvalidSetting, said
from durable.telemetry import log

RECOVERY_SECONDS = 600.0  # of a server that was killed while it had much to write
_QUIET_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 60.0
_ENDING_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01
_LOG_LINES: Final = 10
_LOG_BYTES: Final = 10_000
_FULL_BYTES: Final = 1 << 20


class Server:
    """The server of this data. Its owner runs and stops it; to a block that joins it, it is only an address."""

    def __init__(self, data: Path, programs: Programs) -> None:
        self.data = data
        self.programs = programs
        self._process: Popen[bytes] | None = None
        self._sockets: Path | None = None
        self._port = 0

    @property
    def pid(self) -> int | None:
        """The process id of the server; None when it does not run."""
        found = postmaster(self.data)
        return found.pid if found is not None and self.is_running else None

    @property
    def is_running(self) -> bool:
        return is_ready(self.data)

    def url(self, database: str) -> str:
        assert self._sockets is not None
        return url_to(self._sockets, self._port, database)

    def join(self) -> bool:
        """Learn the address of the server that runs, if one does; to start it is left to its owner."""
        found = postmaster(self.data)
        if found is None or not self.is_running:
            return False
        self._sockets = self._sockets or found.sockets  # its owner trusts no file of another user
        self._port = found.port
        return True

    def run(self, sockets: Path | None = None) -> None:
        """Start it unless it runs, where it was before or is told to, and wait while it recovers its data.

        Raises InvalidSetting, with the end of its log, when it does not start.
        """
        if self.is_running:
            return
        self._end(signal.SIGQUIT, _ENDING_SECONDS)  # the last one may be on its way out
        self._sockets = sockets or self._sockets
        begun = self._started()
        deadline = time.monotonic() + RECOVERY_SECONDS
        warned = time.monotonic() + _QUIET_SECONDS
        while not self.join():
            if self._has_ended():
                raise self._failure("its server does not start", begun)
            if time.monotonic() >= deadline:
                self._end(signal.SIGQUIT, _ENDING_SECONDS)
                raise self._failure(f"its server recovered for {RECOVERY_SECONDS:.0f} s", begun)
            if time.monotonic() >= warned:
                log.warning("embedded Postgres recovers its data; waiting: folder %s", self.data.parent)
                warned = deadline
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop it as an operator would, cutting every connection. One that has ended before is stopped."""
        self._end(signal.SIGINT, _STOP_SECONDS)

    def restart(self) -> None:
        self.stop()
        end_left_behind(self.data)
        self.run()

    def _started(self) -> int:
        """Start the process, and return the length of its log before."""
        assert self._sockets is not None
        way = way_to(self.data, self.programs.account)
        sockets = way if self._sockets == self.data else self._sockets
        command = [self.programs.folder / "postgres", "-D", way, "-k", sockets]
        try:
            remove_sockets(self._sockets)
            with appended(self.data / "log") as told:
                begun = told.seek(0, 2)
                self._process = Popen(
                    [*map(str, command), "-c", f"cluster_name={server_name(self.data)}"],
                    **options(self.programs.account),
                    cwd=self.data,
                    stdout=told,
                    stderr=STDOUT,
                    start_new_session=True,  # Ctrl-C at the terminal is meant for this process
                )
        except OSError as error:
            raise InvalidSetting(
                f"postgres: folder={str(self.data.parent)!r}: its server does not start: {said(error)}; mend that, and"
                " start it again"
            ) from error
        return begun

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _end(self, number: int, seconds: float) -> None:
        for last, within in ((number, seconds), (signal.SIGQUIT, _ENDING_SECONDS), (signal.SIGKILL, _ENDING_SECONDS)):
            if self._has_ended():
                return
            assert self._process is not None
            self._process.send_signal(last)
            try:
                self._process.wait(within)
            except TimeoutExpired:
                log.warning("embedded Postgres does not end; telling it again: folder %s", self.data.parent)

    def _failure(self, text: str, begun: int) -> InvalidSetting:
        told = self._log_end(begun)
        if self._has_full_disk():  # the log may have no room to say so
            text += ": its disk is full; make room, and start it again"
        elif told:
            text += "; mend what its log says, and start it again"
        elif self._process is not None:
            text += f": it ended with {self._process.returncode}, and its log says nothing"
        return InvalidSetting(f"postgres: folder={str(self.data.parent)!r}: {text}" + (f":\n{told}" if told else ""))

    def _has_full_disk(self) -> bool:
        with suppress(OSError):
            return shutil.disk_usage(self.data).free < _FULL_BYTES
        return False

    def _log_end(self, begun: int) -> str:
        """The last lines of this start."""
        try:
            with opened(self.data / "log") as file:
                file.seek(0, 2)
                file.seek(max(begun, file.tell() - _LOG_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-_LOG_LINES:])
        except OSError:
            return ""
