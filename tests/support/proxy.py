"""The proxy is published with the suite for transports; tests that are about other things take it from here."""

from durable.testing.transports.proxy import DOWN, UP, ChaosProxy, Direction

__all__ = ["DOWN", "UP", "ChaosProxy", "Direction"]
