"""What an evaluation keeps, and the statistics of its figures."""
