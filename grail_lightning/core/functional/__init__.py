"""Pure functions of tensors, without state, configuration, model or logger."""
