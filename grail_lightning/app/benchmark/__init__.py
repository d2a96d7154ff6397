"""The benchmark of token credit: errors that a method finds, what a step gains, training, and cost."""
