"""The guests: each folder uses the core and is not known to it, nor to another folder."""
