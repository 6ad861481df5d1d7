"""Mutants: durable with one guard taken away, and the tests that notice it.

guards     a table by hand: a guard, the change that takes it away, and the tests that must fail then
trees      private copies of the tree; the checkout itself is never changed
trials     one run of some tests in such a copy, and its verdict
witness    the plugin by which pytest tells what became of each test
report     the table at the end, and JSON
operators  mutants that are made by the operators of a tool, instead of by hand
"""
