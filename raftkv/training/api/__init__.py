"""A run, as the program that trains sees it."""
