"""A page as bytes: one file per format."""
