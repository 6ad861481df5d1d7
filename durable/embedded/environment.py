"""The environment of a private Postgres's programs: nothing that is set for another server, or another user, gets in.

libpq and Postgres read some thirty variables PG*; each may lead to another server, or change what this one does.
"""

from __future__ import annotations

import os


def private() -> dict[str, str]:
    """The whole environment. Any other locale may be one that is not installed."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
