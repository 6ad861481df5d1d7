"""Middleware that comes with durable: `bus.use(Logging(), stage="before")`."""

from durable.application.middlewares.logging import Logging
from durable.application.middlewares.validation import Validation

__all__ = ["Logging", "Validation"]
