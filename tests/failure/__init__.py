"""What may go wrong, made to go wrong: crashes at every point, guards removed, networks and servers that fail."""
