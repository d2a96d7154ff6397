"""Grading for a trainer and by hand: `Verifier`, the worker processes behind it, and the program."""
