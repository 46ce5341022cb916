"""Who takes part in a run."""
