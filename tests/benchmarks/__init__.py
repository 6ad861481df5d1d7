"""What durable costs, as ratios to the same work in plain asyncpg, measured in one run: `make bench`."""
