"""Upper bounds of the Jacobian norm of attention heads, one file each.

To add one, write a file here with its formula, its proof and its record (`record.Bound`), named
like the file in capitals. Nothing else lists the bounds: `record.load_bounds` reads this folder.
"""
