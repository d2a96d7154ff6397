"""The batch of rollouts in its three stages, and its rewards."""
