"""Commands of `durable-agent scheduled`."""
