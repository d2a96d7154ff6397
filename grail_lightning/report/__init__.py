"""Figures of runs with intervals, and their paired differences: `python -m grail_lightning.report`."""
