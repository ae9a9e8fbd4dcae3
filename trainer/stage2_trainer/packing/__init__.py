"""Which segments share a row: knows lengths, and nothing of what has them."""
