"""`durable-agent doctor`."""
