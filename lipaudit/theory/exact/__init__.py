"""The exact Jacobian of attention heads at a point, as products, and its norms."""
