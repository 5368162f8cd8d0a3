"""How large the norm of a head can get if tokens are added or changed."""
