"""Real servers for the tests: a Postgres with a fresh migrated database for each test that wants one, and a RabbitMQ.

tests/support/servers.py says which; pytest names them at its beginning. `every_server` runs a test on each version of
Postgres that is on the machine.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import settings
from psycopg import sql

from durable import redaction
from durable.embedded import Broker, Embedded
from durable.messages import codec, registry, upcasting
from tests.support import servers as sources
from tests.support.servers import (
    EMBEDDED,
    AnyBroker,
    Names,
    create_database,
    older_servers,
    renew_template,
    shared_broker,
    shared_postgres,
)
from tests.support.sharing_out import Part, shared_out

# A machine that is busy makes no example wrong.
settings.register_profile("unhurried", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=10)
settings.load_profile("unhurried")


def pytest_report_header() -> list[str]:
    return sources.report()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What was imported and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=Part.parse,
        metavar="K/N",
        help="run the K-th of N parts of the tests, for N machines side by side",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part: Part | None = config.getoption("--part")
    if part is not None:
        config.hook.pytest_deselected(items=[item for item in items if not part.includes(item.nodeid)])
        items[:] = [item for item in items if part.includes(item.nodeid)]
    workers: int = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = shared_out(items, workers)


@pytest.fixture(autouse=True)
def forgotten_secrets() -> Iterator[None]:
    """A process keeps the secrets that it was given: those of one test would be stars in the texts of the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "_secrets", {})
        yield


@pytest.fixture
def no_messages() -> Iterator[None]:
    """A process that has declared no messages: the types, steps between versions and codecs of other tests are away."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_by_name", "_by_class", "_content_types"):
            patch.setattr(registry, name, {})
        patch.setattr(registry, "_encrypted", set())
        patch.setattr(upcasting, "_steps", {})
        patch.setattr(codec, "_codecs", dict(codec._codecs))
        yield


@pytest.fixture(autouse=True)
def plain_logs(pytestconfig: pytest.Config) -> None:
    """pytest hands its handlers to loggers that do not propagate; those of PySpark change their format for good."""
    spark = sys.modules.get("pyspark.logger.logger")
    if spark is not None and spark.PySparkLogger.addHandler is not logging.Logger.addHandler:
        spark.PySparkLogger.addHandler = logging.Logger.addHandler
        plugin: Any = pytestconfig.pluginmanager.get_plugin("logging-plugin")
        for handler in (plugin.caplog_handler, plugin.report_handler):
            handler.setFormatter(plugin.formatter)
    if logging.getLoggerClass() is not logging.Logger:
        logging.setLoggerClass(logging.Logger)


# ---------------------------------------------------------------- Postgres


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[int], Embedded]]:
    """Servers by version, each started when it is first asked for."""
    with ExitStack() as stack:
        started: dict[int, Embedded] = {}

        def server(version: int) -> Embedded:
            if version not in started:
                started[version] = stack.enter_context(shared_postgres(version))
            return started[version]

        yield server


@pytest.fixture
def server(servers: Callable[[int], Embedded]) -> Embedded:
    """The Postgres that all tests share."""
    return servers(EMBEDDED)


@pytest.fixture(params=[EMBEDDED, *older_servers()], ids=lambda version: f"pg{version}")
def every_server(request: pytest.FixtureRequest, servers: Callable[[int], Embedded]) -> Embedded:
    return servers(request.param)


@contextmanager
def fresh_databases(server: Embedded) -> Iterator[Callable[[str], str]]:
    """Makes migrated databases on this server, and drops them at the end."""
    made: list[str] = []
    with psycopg.connect(server.uri(), autocommit=True) as conn:

        def make(name: str = "app") -> str:
            database = f"{name}_{uuid4().hex[:12]}"
            renew_template(server)
            create_database(conn, database)
            made.append(database)
            return server.uri(database)

        yield make
        for database in made:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


@pytest.fixture
def make_database(server: Embedded) -> Iterator[Callable[[str], str]]:
    """`make_database("orders")` returns the URL of a fresh database with durable's tables."""
    with fresh_databases(server) as make:
        yield make


@pytest.fixture
def database_url(make_database: Callable[[str], str]) -> str:
    """The URL of a fresh database with durable's tables."""
    return make_database("app")


# ---------------------------------------------------------------- RabbitMQ


@pytest.fixture(scope="session")
def queue_name() -> Names:
    """`queue_name("orders")` returns a name that nobody else uses, for a queue, an exchange or a service.

    Names that are derived from it, as those of a service's queues, are told by `queue_name.also(...)`: then they are
    not left behind on a broker that is given by URL.
    """
    return Names()


@pytest.fixture(scope="session")
def broker(queue_name: Names) -> Iterator[AnyBroker]:
    """The RabbitMQ that all tests share: `broker.url`. It must be left as it is, and names are from `queue_name`."""
    with shared_broker(queue_name) as found:
        yield found


@pytest.fixture(scope="session")
def _own_broker() -> Iterator[Broker]:
    with sources.own_broker() as broker:
        yield broker


@pytest.fixture
def own_broker(_own_broker: Broker) -> Iterator[Broker]:
    """A RabbitMQ that the test may kill, stop, start, pause and bring short of memory: see durable.embedded.Broker.

    One serves the whole session, and each test finds it running, answering and without alarm. Its queues stay, so that
    names are from `queue_name` here too. It takes some 4 seconds to start again.
    """
    yield _own_broker
    _own_broker.recover()
