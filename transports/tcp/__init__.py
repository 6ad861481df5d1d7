"""TCP and Unix sockets."""
