"""Distribution of a policy over devices and ranks: sharded weights, gradients of a step, and master weights."""
