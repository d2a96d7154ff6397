"""Token credit inside TRL's `GRPOTrainer`."""
