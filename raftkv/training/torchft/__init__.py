"""torchft's lighthouse, replicated."""
