"""What an evaluation keeps, its table, the statistics of its figures, and the comparison of runs."""
