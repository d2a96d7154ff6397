"""Grids of runs, methods × tasks × seeds, from one YAML file: ``python -m grail_lightning.sweep``."""
