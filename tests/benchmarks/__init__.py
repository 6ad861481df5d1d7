"""What durable costs, as ratios to plain asyncpg and plain clients that do the same in the same run: `make bench`."""
