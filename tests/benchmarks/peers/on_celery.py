"""Celery with RabbitMQ: the business transaction commits, and then the task is published.

A crash between the two loses the task. From there on tasks are not lost: publishing is confirmed, and a task is acked
after its end. Short tasks are prefetched by the hundred, as its guide on optimizing says. Its tasks are synchronous, in
processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from tests.benchmarks.peers.program import AT_ONCE, INSERT, POOL, TEXT, Enlist, Order, Program, main

PREFETCHED = 128  # for each process


def make_app(order: Order) -> Celery:
    app = Celery("bench", broker=order.broker)
    app.conf.update(
        task_default_queue=order.queue,
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=PREFETCHED,
        broker_pool_limit=AT_ONCE,
        broker_transport_options={"confirm_publish": True},
    )
    return app


def make_engine(order: Order) -> Engine:
    return create_engine(order.url_for("psycopg"), **POOL)


async def install(order: Order) -> None:
    """The queue is declared by the first who uses it."""


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    app = make_app(order)
    engine = make_engine(order)
    note = app.signature("note")

    def enlist(number: int) -> None:
        with Session(engine) as session:
            session.execute(text(INSERT), {"number": number})
            session.commit()
        note.apply_async((number, TEXT))

    yield enlist
    app.close()
    engine.dispose()


def handle(order: Order) -> None:
    app = make_app(order)
    engine = make_engine(order)  # each process takes one connection, at its first task

    @app.task(name="note")
    def take(number: int, note: str) -> None:
        with Session(engine) as session:
            session.execute(text(INSERT), {"number": -number})
            session.commit()

    options = ["--without-gossip", "--without-mingle", "--loglevel", "ERROR"]
    app.worker_main(["worker", "--pool", "prefork", "--concurrency", str(AT_ONCE), *options])


if __name__ == "__main__":
    main(Program("celery", install, enlisting, handle))
