"""Fuzzing: hostile input for everything that reads what others have written.

A target is a strategy of inputs and a check. The check returns a word for what became of the input, and fails when a
promise is broken; "it does not crash" is never all of the promise:

- a decoder answers with its one documented error, or with a value that encodes back to the same value;
- a running node goes on serving a good peer, holds nothing of the exchange, and logs no traceback.

`make test` runs each target for some seconds (test_targets.py), `make fuzz MINUTES=n` all of them for longer
(__main__.py), with fresh seeds and the corpus of former runs.
"""
