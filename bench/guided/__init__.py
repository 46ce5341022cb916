"""The native build, laid out by which way calls take: built once to count that, and again by the counts."""
