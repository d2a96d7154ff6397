"""The data modules, which turn datasets into `Prompt`s, and their loaders."""
