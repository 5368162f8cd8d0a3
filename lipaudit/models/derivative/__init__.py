"""A whole model as a linear map: `linearize.linearize` runs it, `model_norms` takes its norms."""
