import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from shop import Base, bus
from sqlalchemy import create_engine

from durable import Bus
from durable.embedded import postgres


@pytest.fixture(scope="session")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres(tmp_path_factory.mktemp("pg")) as server:
        url = server.url("shop")
        subprocess.run([sys.executable, "-m", "durable.cli", "migrate", "--database", url], check=True)
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
        Base.metadata.create_all(engine)
        engine.dispose()
        yield url


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[Bus]:
    bus.configure(database_url=database_url, poll_interval="100ms")
    async with bus:  # a real node, until the end of the test
        yield bus
