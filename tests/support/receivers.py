"""The receiver in memory is published with the suite for transports; tests take it and its envelopes from here."""

from durable.testing.transports.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes

__all__ = ["REJECTED_TYPE", "MemoryReceiver", "envelope", "envelopes"]
