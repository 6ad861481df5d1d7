"""What applications rely on, on Postgres and in memory alike: durable.testing shows what will happen in production."""
