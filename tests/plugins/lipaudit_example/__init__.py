"""A package outside lipaudit that adds to it: one file per kind of plug-in."""
