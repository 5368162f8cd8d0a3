"""The Jacobian of a whole model: `linearize` gives its products, `model_norms` its norms."""
