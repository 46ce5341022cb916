"""A throwaway cluster."""
