"""Dead letters: resolved in bulk, or rehearsed with their handler."""
