"""Free ports of this machine, for servers that are told their port before they start."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

from durable.errors import InvalidSetting

PORTS = range(10_000, 32_000, 2)  # below those that systems give to clients: still free when the server binds it


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, as is the next one."""
    for _ in range(100):
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise InvalidSetting(f"no free ports between {PORTS.start} and {PORTS.stop}; stop another server")
