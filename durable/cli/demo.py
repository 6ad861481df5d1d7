"""demo: two services, a killed node, and a check that no message is lost."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from durable.cli.command import Debug, reading
from durable.errors import WiringError, needs

Transport = Annotated[
    Literal["tcp", "http", "rabbitmq"], typer.Option("--transport", help="transport between the services")
]
Flights = Annotated[int | None, typer.Option("--flights", min=1, metavar="N", help="number of flights to send")]
All = Annotated[bool, typer.Option("--all", help="send every flight of the year")]
Seed = Annotated[int | None, typer.Option("--seed", help="repeat the choices of another run with this seed")]
Keep = Annotated[
    Path | None,
    typer.Option("--keep", metavar="FOLDER", file_okay=False, help="folder for databases and logs"),
]
Pipeline = Annotated[
    Path | None,
    typer.Option(
        "--pipeline",
        metavar="FOLDER",
        file_okay=False,
        help="archive, audit, report and replay the history in this folder; a demo found there is used",
    ),
]
Console = Annotated[
    bool, typer.Option("--console", help="serve the console of both services; on a terminal until Ctrl-C")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


@reading()
def demo(
    transport: Transport = "tcp",
    flights: Flights = None,
    all_flights: All = False,
    json: Json = False,
    seed: Seed = None,
    keep: Keep = None,
    pipeline: Pipeline = None,
    console: Console = False,
    debug: Debug = False,
) -> None:
    """Run two services on an embedded Postgres, kill a node, and check that no message is lost."""
    if flights is not None and all_flights:
        raise WiringError("--flights: --all is given too; give one of them")
    if keep is not None and pipeline is not None:
        raise WiringError("--keep: --pipeline has a folder of its own; give one of them")
    if console and pipeline is not None:
        raise WiringError("--console: not with --pipeline, whose commands follow; leave one of them out")
    _forget_other_servers()
    with needs("demo", extra="demo"):
        from durable.demo import run_demo, run_pipeline

    if pipeline is None:
        run = partial(run_demo, keep=keep, shows_console=console)
    else:
        from durable.cli.pipeline.plan import run_step

        run = partial(run_pipeline, run_step, folder=pipeline)
    raise typer.Exit(run(transport=transport, flights=flights, all_flights=all_flights, json_output=json, seed=seed))


def _forget_other_servers() -> None:
    """Remove libpq's variables, for this process and the nodes: they might lead to a server that is not the demo's."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]
