"""How large the norm of a head can get as tokens are added or moved."""
