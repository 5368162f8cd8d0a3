"""Upper bounds of the Jacobian norm of attention heads, one file each.

To add one, write a file with its formula, its proof and its record (`record.Bound`), and name the
record in `catalogue.OWN`.
"""
