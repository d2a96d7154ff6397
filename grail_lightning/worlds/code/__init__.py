"""Functions to write, with tests."""
