"""Spectral norms: upper bounds, and estimates from below by Lanczos."""
