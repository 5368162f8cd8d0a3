"""How the constants grow with the length of the input."""
