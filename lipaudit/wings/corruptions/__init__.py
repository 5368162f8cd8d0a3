"""Accuracy under common corruptions of images, and typing errors."""
