"""Which runs may use a cluster's slots."""
