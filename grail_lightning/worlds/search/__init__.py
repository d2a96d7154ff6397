"""Questions whose facts are looked up."""
