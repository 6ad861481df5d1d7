"""Failures of the stories of recovery, logged once, however often a story meets them.

    the database cannot be used     one line when the first story meets it, whatever the driver says each time;
                                    one when it is over
    something of durable is missing one line for each missing thing, and one when it is there again
    anything else                   a traceback the first time, a line each time

Some stories run seldom. So an outage is over when none of those that run `often` meets it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from durable.errors import StorageUnavailable
from durable.storage.outages import Lack
from durable.telemetry import log


class Troubles:
    """Failures that one agent has met."""

    def __init__(self, often: Collection[str]) -> None:
        self._often = frozenset(often)
        self._cut_off: set[str] = set()
        self._is_outage = False
        self._lacks: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    def meet(self, name: str, error: BaseException) -> None:
        """Tell that this story has failed."""
        if isinstance(error, Lack):
            is_new, self._lacks[name] = str(error) not in self._lacks.values(), str(error)
            log.log(logging.WARNING if is_new else logging.DEBUG, "recovery of %s waits: %s", name, error)
        elif isinstance(error, StorageUnavailable):
            is_new = not self._is_outage and name not in self._cut_off
            self._cut_off.add(name)
            self._is_outage |= is_new
            log.log(logging.WARNING if is_new else logging.DEBUG, "recovery of %s waits: %s", name, error)
        else:
            is_new, self._failures[name] = str(error) != self._failures.get(name), str(error)
            log.error("recovery of %s failed: %r", name, error, exc_info=error if is_new else None)

    def overcome(self, name: str) -> None:
        """Hear that this story has succeeded."""
        self._failures.pop(name, None)
        lack = self._lacks.pop(name, None)
        if lack is not None and lack not in self._lacks.values():
            log.info("recovery of %s goes on: what was missing is there again", name)
        self._cut_off.discard(name)
        if self._is_outage and not self._cut_off & self._often:
            self._is_outage = False
            log.info("recovery of %s goes on: the database can be used again", name)
