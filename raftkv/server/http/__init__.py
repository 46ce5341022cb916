"""Plain HTTP on the client port."""
