"""Rules of basic operations on forms: affine maps, moves, curves, products, attention, norms."""
