"""Middleware that comes with durable: `bus.use(Logging(), group="before")`."""

from durable.middlewares.logging import Logging
from durable.middlewares.validation import Validation

__all__ = ["Logging", "Validation"]
