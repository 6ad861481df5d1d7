"""All targets, by name, in the order in which `make fuzz` takes them."""

from __future__ import annotations

from tests.fuzz import wire

TARGETS = {target.name: target for target in (*wire.TARGETS,)}
