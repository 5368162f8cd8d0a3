"""Checkpoints: loading them, running them, reading their attention, linearising them."""
