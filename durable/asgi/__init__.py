"""Web applications: a unit of work for each HTTP request, and the bus in the lifespan."""

from durable.asgi.middleware import DurableMiddleware, unit_of_work

__all__ = ["DurableMiddleware", "unit_of_work"]
