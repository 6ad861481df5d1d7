"""Commands `durable-agent doctor` and `check-deploy`."""
