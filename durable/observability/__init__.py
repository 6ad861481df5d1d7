"""Health, metrics and the state of a process, read from the agents and the database."""
