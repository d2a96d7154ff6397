"""Tasks, which define the prompt, the reference answer and the reward of a problem, and may label wrong steps."""
