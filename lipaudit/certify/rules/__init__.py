"""What basic operations do to forms: affine maps, moves, curves, products, attention, norms."""
