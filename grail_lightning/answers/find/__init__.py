"""Where an answer stands: boxes in a text, and the tokens that carry a range of characters."""
