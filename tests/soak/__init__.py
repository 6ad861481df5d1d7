"""Hours of constant load, with a fault a minute: what a node and its database hold must not grow."""
