"""Upper bounds of the Jacobian norm of attention heads."""
