"""Rollout engines: they sample responses to prompts, as token ids."""
