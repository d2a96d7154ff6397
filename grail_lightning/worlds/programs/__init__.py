"""Programs that a policy writes: what running one showed, and where it departs from a reference."""
