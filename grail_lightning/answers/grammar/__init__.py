"""What an answer says: one spelling for one thing, then its structure and the trees of its formulas."""
