"""The flags of a member."""
