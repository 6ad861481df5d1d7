"""Python workers of Spark that have imported what they need before they are forked.

Spark forks the workers of each kind of work from a daemon that has imported nothing, so that each write, plan and
commit begins with a second of imports. The program of warm_python() is given to Spark as its Python: its daemons import
once, and not from the archive of Spark's sources, which Python would compile anew each time.
"""

from __future__ import annotations

import gc
import runpy
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.support.command import ROOT

_DAEMON: Final = "pyspark.daemon"
_IMPORTED: Final = (
    "pyspark.worker",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.pandas.serializers",
    "pyarrow.parquet",
    "pandas",
    "durable.pipeline.archive",
    "durable.pipeline.publish",
    "durable.pipeline.audit",
    "durable.pipeline.source",
)


def warm_python(folder: Path) -> Path:
    """Write a program into this folder that takes the arguments of Python, and whose daemons of Spark are warm."""
    program = folder / "python"
    program.write_text(f"""#!/bin/sh
[ "$2" = {_DAEMON} ] || exec {sys.executable} "$@"
PYTHONPATH="$PYTHONPATH:{ROOT}" exec {sys.executable} -m {__name__} "$3"
""")
    program.chmod(0o755)
    return program


def main() -> None:
    """Run the daemon, for the workers that the argument names."""
    sys.path = [place for place in sys.path if not place.endswith((".zip", ".jar")) or "pyspark" not in place]
    for name in _IMPORTED:
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    runpy.run_module(_DAEMON, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
