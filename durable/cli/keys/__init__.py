"""Commands of `durable-agent keys`."""
