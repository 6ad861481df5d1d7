"""Commands of `durable-agent dead-letters`."""
