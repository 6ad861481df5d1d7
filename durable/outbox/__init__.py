"""The outbox: messages that are stored in the transaction of the application."""
