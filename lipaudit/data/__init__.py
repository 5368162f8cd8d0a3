"""Samples to audit: images, arrays and text, read into batches."""
