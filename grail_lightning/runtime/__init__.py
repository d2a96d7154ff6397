"""What the whole package stands on: ranks, random seeds, clocks and the folder of a run."""
