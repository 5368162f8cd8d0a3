"""What stands on a page, and in which order."""
