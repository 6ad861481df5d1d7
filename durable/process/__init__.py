"""A process of a service: its start, its nodes one after another, its end."""
