"""How exactly norms are taken, and how long proofs are tried, if nobody says; imports no torch."""

TOL = 1e-4
"""Relative accuracy of a norm, estimated."""
WITHIN = 0.03
"""How far the probabilistic limit may lie above a norm: what is proven."""
LAYER_WITHIN = 0.2
"""The same of the norm of a whole layer, where a product costs as much as the layer."""
NODES = 60_000
"""Parts of a ball that branch and bound looks at."""
