"""Sampling with the policy itself, in this process."""
