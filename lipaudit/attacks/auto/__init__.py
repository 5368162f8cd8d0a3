"""The attacks of AutoAttack (Croce & Hein, arXiv 2003.01690), as pyautoattack runs them.

The loops are ours: the same steps from the same draws, so that the same samples stand, without
the passes whose outcome is known. A sample leaves an attack once it is broken, turns may share a
batch, the last step takes no gradient, and Square never asks twice. Only the L2 version of Square
is the package's own.
"""
