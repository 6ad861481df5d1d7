"""What durable costs, as ratios to the same work in plain asyncpg and plain clients, measured in one run: `make bench`."""
