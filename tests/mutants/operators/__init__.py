"""Mutants made by the operators of Cosmic Ray: `+` becomes `-`, a condition its contrary, a loop runs no time.

rooms     a table by hand: the modules that make the guarantees, and the tests of each room
places    each place of a module that an operator can change, and the seeded sample of them
meaning   places without meaning for the behaviour of durable, which make no mutants
contexts  the plugin by which coverage.py records the lines of each test
reach     the tests that execute a line, and the seconds that each takes
trial     the trial of one mutant: its tests from the cheapest on, and the simulation
known     a table by hand: survivors that are no fault of the tests, with the reason
report    the table at the end, the survivors, and JSON
"""
