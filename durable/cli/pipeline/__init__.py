"""`durable-agent pipeline`."""
