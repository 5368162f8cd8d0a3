"""Samples to audit on: images, arrays and text, read into batches."""
