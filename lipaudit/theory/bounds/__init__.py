"""Upper bounds of the Jacobian norm of attention heads, one file each.

A bound of ours is a function of `ingredients.Ingredients`; `head_bounds.FORMULAS` lists them.
"""
