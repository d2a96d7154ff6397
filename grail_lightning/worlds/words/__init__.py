"""Word problems with worked solutions."""
