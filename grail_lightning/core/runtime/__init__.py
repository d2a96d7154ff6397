"""Functions for all other packages: ranks, random seeds, clocks and the folder of a run."""
