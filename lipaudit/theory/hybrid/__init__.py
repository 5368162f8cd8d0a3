"""Bounds of a network on boxes of inputs that can be trained: a loss, not a claim.

A hybrid zonotope is linear in the input, exactly so far as the network is, with a box around for
all else. It costs one forward of the model for every input and has a gradient, but no proof
against rounding: what is certified is certified by `theory.relaxation`.
"""
