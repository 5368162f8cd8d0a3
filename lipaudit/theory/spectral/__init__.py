"""Spectral norms: proven from above, and met from below by Lanczos."""
