"""Chains of additions and subtractions."""
