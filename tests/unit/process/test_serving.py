"""A process that is the bus's own, run as one."""

from __future__ import annotations

import resource
import subprocess
import sys

PROCESS = """
import os, resource, signal
from durable import Bus
from durable.process import serving

class Ends:
    async def __aenter__(self):
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.kill(os.getpid(), signal.SIGTERM)

    async def __aexit__(self, *_): ...

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
serving.run(Ends(), Bus("shop", "postgresql://nowhere/shop").runtime.life)
"""


def test_process_may_have_as_many_open_files_as_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) == hard > 256
