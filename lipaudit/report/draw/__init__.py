"""Pictures: as SVG, as characters, and in words."""
