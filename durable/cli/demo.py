"""demo: the shortest proof that nothing is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from durable.cli.target import Debug
from durable.errors import WiringError

Transport = Annotated[
    Literal["tcp", "http", "rabbitmq"], typer.Option("--transport", help="what the messages travel over")
]
Flights = Annotated[int | None, typer.Option("--flights", min=1, metavar="N", help="how many flights to send")]
All = Annotated[bool, typer.Option("--all", help="send every flight of the year")]
Seed = Annotated[int | None, typer.Option("--seed", help="make the same choices as another run with this seed")]
Keep = Annotated[
    Path | None, typer.Option("--keep", metavar="FOLDER", file_okay=False, help="keep the databases and logs here")
]
Pipeline = Annotated[
    Path | None,
    typer.Option(
        "--pipeline",
        metavar="FOLDER",
        file_okay=False,
        help="then archive, audit, report and replay its history there; a demo that is there already is used",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def demo(
    transport: Transport = "tcp",
    flights: Flights = None,
    all_flights: All = False,
    json: Json = False,
    seed: Seed = None,
    keep: Keep = None,
    pipeline: Pipeline = None,
    debug: Debug = False,
) -> None:
    """Two services on an embedded Postgres; a node is killed, and nothing is lost."""
    if flights is not None and all_flights:
        raise WiringError("--flights: give a number or --all, not both")
    if keep is not None and pipeline is not None:
        raise WiringError("--keep: --pipeline keeps everything in its own folder; give one of them")
    from durable.demo import run_demo, run_pipeline  # its libraries are an extra, and nobody else needs them

    run = partial(run_demo, keep=keep) if pipeline is None else partial(run_pipeline, folder=pipeline)
    raise typer.Exit(run(transport=transport, flights=flights, all_flights=all_flights, json_output=json, seed=seed))
