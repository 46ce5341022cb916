"""Keys, values and transactions."""
