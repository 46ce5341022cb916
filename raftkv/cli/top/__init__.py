"""The live table of a cluster."""
