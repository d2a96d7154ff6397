"""Environments: what a policy can call in the course of a rollout, and what it was told. Nothing here needs torch."""
