"""What each message costs the database, counted: the same on every machine, and held against a committed file."""
