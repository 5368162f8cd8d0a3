"""Pages of results, one file per chapter."""
