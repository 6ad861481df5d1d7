import os
from dataclasses import dataclass

from durable import Bus, Keys, message

bus = Bus("orders")


def from_vault(name: str) -> bytes:
    return os.urandom(32)


async def finish() -> None:
    if bus.application.ring.is_configured:
        bus.application.ring.load()
    await bus.runtime.sessions.close()
    await bus.runtime.database.close()
