"""Training runs on the command line."""
