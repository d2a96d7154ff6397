"""The benchmark of token credit: does a method find errors, what does a step gain, does it train better, what does it cost."""
