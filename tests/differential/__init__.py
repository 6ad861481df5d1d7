"""Differential runs: one random workload in several worlds, which must come to the same.

workload.py      steps and messages, plain data, drawn from a seed
messages.py      classes of the messages: a lane for each kind of handler
services.py      the two services, `shop` and `billing`, and their handlers
worlds.py        both on the bus in memory, or on Postgres over a transport and a driver
running.py       a workload in a world, and the record of it, which is compared
shrinking.py     the smallest workload that still differs
hunting.py       many workloads, and the report of a difference

`make differential EXAMPLES=n SEED=n` runs many; `python -m tests.differential --again FILE` runs one again.
"""
