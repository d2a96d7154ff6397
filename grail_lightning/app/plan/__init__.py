"""What a run will need, before it begins, and what to set where that is too much."""
