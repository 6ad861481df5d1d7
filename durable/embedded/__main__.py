"""`python -m durable.embedded FOLDER DATABASE`: a private Postgres for a first try, until Ctrl-C.

Prints the URL of the database, which is made when it is missing. The data stays in the folder.
"""

from __future__ import annotations

import signal
import sys

from durable.embedded.postgres import postgres
from durable.errors import InvalidSetting


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m durable.embedded FOLDER DATABASE", file=sys.stderr)
        return 2
    folder, database = arguments
    try:
        with postgres(folder) as server:
            print(f"export DURABLE_DATABASE_URL='{server.url(database)}'", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    except InvalidSetting as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.exit(main(sys.argv[1:]))
