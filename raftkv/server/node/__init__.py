"""The loop of a member, and what it drives: disk, proposals, reads, applying, housekeeping."""
