"""hypothesis without deadlines: a machine that is busy with other things fails no test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
