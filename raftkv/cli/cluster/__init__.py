"""A local cluster in one terminal."""
