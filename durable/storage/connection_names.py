"""Names of connections, as pg_stat_activity shows them: `durable orders agents`.

application_name in the URL, or PGAPPNAME --none--> the name given here
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_LONGEST: Final = 63  # bytes of a name of Postgres


class ConnectionName(NamedTuple):
    """Name of the connections of one pool. Through a pooler all pools of a service have the same: PgBouncer sends a SET
    before a transaction whose client has another name than the one that the server's connection had last.
    """

    direct: str
    pooled: str

    def asyncpg(self, params: Mapping[str, Any], *, pooled: bool) -> dict[str, str]:
        """Return the server setting, unless these arguments of the connection set it. asyncpg reads no PGAPPNAME."""
        if _is_in_options(params):
            return {}
        fallback = params.get("fallback_application_name") or self._of(pooled)
        return {"application_name": os.environ.get("PGAPPNAME") or fallback}

    def psycopg(self, params: Mapping[str, Any], *, pooled: bool) -> dict[str, str]:
        """Return the argument for libpq, which prefers what the URL and PGAPPNAME say."""
        return {} if _is_in_options(params) else {"fallback_application_name": self._of(pooled)}

    def _of(self, pooled: bool) -> str:
        return self.pooled if pooled else self.direct


UNNAMED: Final = ConnectionName("durable", "durable")
OF_COMMANDS: Final = ConnectionName("durable-agent", "durable-agent")


def of_service(service: str, purpose: str) -> ConnectionName:
    """Return the name of connections of this service; of a long name the beginning."""
    room = _LONGEST - len(f"durable  {purpose}")
    short = service.encode()[:room].decode(errors="ignore")
    return ConnectionName(f"durable {short} {purpose}", f"durable {short}")


def _is_in_options(params: Mapping[str, Any]) -> bool:
    return "application_name" in str(params.get("options", ""))
