"""Python processes of Spark that begin quickly.

Spark puts the archives of its sources before all else on PYTHONPATH, and Python compiles what it imports from an
archive anew in each process. And it forks the workers of each kind of work from a daemon that has imported nothing, so
that each write, plan and commit begins with a second of imports. Given to Spark as its Python, a program of this module
imports Spark from the installed package, and its daemons import once.
"""

from __future__ import annotations

import gc
import runpy
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.support.root import ROOT

_DAEMON: Final = "pyspark.daemon"
_OF_TASKS: Final = "pyspark.worker"
_IMPORTED: Final = (
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.pandas.serializers",
    "pyarrow.parquet",
    "durable.pipeline.source",
)
_IMPORTED_FOR_TASKS: Final = (
    _OF_TASKS,
    "pandas",
    "durable.pipeline.archive",
    "durable.pipeline.publish",
    "durable.pipeline.audit",
)
_WITHOUT_ARCHIVES: Final = """#!/bin/sh
IFS=:
kept=
for place in $PYTHONPATH; do
    case $place in
        */pyspark/python/lib/*.zip | */pyspark/jars/*.jar) ;;
        *) kept="$kept:$place" ;;
    esac
done
export PYTHONPATH="${kept#:}"
"""


def warm_python(folder: Path) -> Path:
    """Write a program into this folder that takes the arguments of Python, and whose daemons of Spark are warm."""
    daemon = f'[ "$2" = {_DAEMON} ] && PYTHONPATH="$PYTHONPATH:{ROOT}" exec {sys.executable} -m {__name__} "$3"'
    return _program(folder, daemon)


def plain_python(folder: Path) -> Path:
    """Write a program into this folder that takes the arguments of Python, and finds durable nowhere by itself."""
    return _program(folder)


def _program(folder: Path, *lines: str) -> Path:
    program = folder / "python"
    if not program.exists():  # a shell reads it line by line
        program.write_text("\n".join([_WITHOUT_ARCHIVES, *lines, f'exec {sys.executable} "$@"', ""]))
        program.chmod(0o755)
    return program


def main() -> None:
    """Run the daemon, for the workers that the argument names."""
    for name in (*_IMPORTED, *(_IMPORTED_FOR_TASKS if sys.argv[1] == _OF_TASKS else ())):
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    runpy.run_module(_DAEMON, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
