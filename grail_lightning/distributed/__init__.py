"""How a policy is spread over devices and ranks: sharded weights, gradients of a step, and master weights."""
