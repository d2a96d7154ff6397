"""The benchmark of token credit: which errors a method finds, what a step gains, how it trains, and what it costs."""
