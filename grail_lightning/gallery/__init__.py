"""Credit methods and estimators of the advantage, each in a file of its own, loaded only where it is named."""
