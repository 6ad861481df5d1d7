"""`durable-agent scheduled`."""
