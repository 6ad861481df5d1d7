"""durable beside other libraries that do the same work, each in a Python environment of its own: `make bench PEERS=1`.

The programs on_*.py are run by the Python of their peer. They, and what they import from here, must not import durable.
"""
