"""What a problem, an episode and a picture are, and the columns of a rollout in files. Nothing here imports torch."""
