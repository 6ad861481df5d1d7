"""The folder of the checkout, for programs that tests start: they import no more than they need."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
