"""Two services as real processes on real servers, under many faults at once; then calm, and a verdict."""
