"""Whether two answers are equal: `judge` asks layer after layer, the cheapest first."""
