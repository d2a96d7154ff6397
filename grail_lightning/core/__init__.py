"""The training step and what it stands on. It knows no world and no method of the gallery by name."""
