"""Receipts: what became of a message, for whoever has its id.

receipts    the outcome of a message, made of the places where it was
watch       waits for outcomes: one look at the database for all ids that are waited for
"""
