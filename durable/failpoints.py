"""Named places where a test can make the process die, as if its machine had lost power.

`DURABLE_FAILPOINT=C5` ends the process the first time it reaches failpoint C5, `C5:3` the third time. Without the
variable a failpoint is one comparison. The places are listed in docs/guarantees.md.
"""

from __future__ import annotations

import os

EXIT_STATUS = 86

_name, _, _count = os.environ.get("DURABLE_FAILPOINT", "").partition(":")
_remaining = int(_count or 1)


def failpoint(name: str) -> None:
    """End the process here, without any clean-up, if this failpoint is the one that was asked for."""
    if name == _name:
        _die_when_due()


def _die_when_due() -> None:
    global _remaining
    _remaining -= 1
    if _remaining <= 0:
        os._exit(EXIT_STATUS)


def is_armed(name: str) -> bool:
    """True for the failpoint that was asked for. Serves places that do half of something before they die."""
    return name == _name
