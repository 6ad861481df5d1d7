"""Transports: how envelopes travel. A folder for each, and the rules of the wire that they share.

A transport knows nothing of the database. It hands batches to a `Receiver` and brings back one outcome for each
envelope; it never decides what becomes of an envelope.
"""

if __name__ != "durable.transports":
    raise ImportError("import durable.transports, not transports: a second copy of every class would be loaded")
