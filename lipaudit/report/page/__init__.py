"""Pages of results: a chapter of each in a file."""
