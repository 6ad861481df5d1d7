"""`python -m durable.embedded FOLDER DATABASE...`: a private Postgres for a first try, until Ctrl-C.

Prints the URL of each database, which is made when it is missing: for one database as an `export` line for a shell, for
several as a line `DATABASE: URL` for each. The data stays in the folder. The server ends with
the process that started it; a second one on the same folder joins it, and leaves it running.
"""

from __future__ import annotations

import signal
import sys
import time

from durable.embedded.postgres import Embedded, postgres
from durable.errors import InvalidSetting

POLL_SECONDS = 0.2
ENDINGS = {signal.SIGINT, signal.SIGTERM}


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print("usage: python -m durable.embedded FOLDER DATABASE...", file=sys.stderr)
        return 2
    folder, *databases = arguments
    try:
        while (code := _serve(folder, databases)) is None:
            pass  # its owner was ending the server: the next one is owned
    except InvalidSetting as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _serve(folder: str, databases: list[str]) -> int | None:
    """Serve these databases until asked to end. None when the server was joined, and ended before it had them."""
    with postgres(folder) as server:
        try:
            urls = [server.url(database) for database in databases]
        except InvalidSetting:
            if server.owned or server.is_running:
                raise
            return None
        if len(urls) == 1:
            print(f"export DURABLE_DATABASE_URL='{urls[0]}'", flush=True)
        else:  # exports would overwrite each other
            for database, url in zip(databases, urls, strict=True):
                print(f"{database}: {url}", flush=True)
        if not server.owned:
            _tell(f"joined the server of {folder}, which another process has started")
        ended = not _runs_until_asked(server)
    if ended:
        _tell(f"error: the server of {folder} has ended; start it again")
        return 1
    _tell(f"the server of {folder} has ended" if server.owned else f"the server of {folder} runs on")
    return 0


def _runs_until_asked(server: Embedded) -> bool:
    """Wait for Ctrl-C or SIGTERM; return False when the server ends before."""
    while server.is_running:
        if signal.sigpending() & ENDINGS:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    sys.exit(main(sys.argv[1:]))
