"""Credit methods beyond those of the core, with the services that they use. None is loaded unless it is named."""
