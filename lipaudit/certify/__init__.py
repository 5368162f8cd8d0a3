"""A whole network on a ball of inputs at once: forms in, certified ranges and margins out.

A `Form` stands for a tensor as a function of the input: centre, coefficients of symbols and slack.
An unmodified model runs on it, every operation by its rule. What comes out holds for every input
of the ball, of **the function of real numbers that the stored weights define**: the rounding of
our own computation is part of the slack (`rounding`). A program that evaluates the model in
float32 rounds by itself; its logits may differ from that function's by its own forward error,
which is no part of the certificate. What a model computes of its weights alone (tables of
positions, masks, the mean of pixels in its own dtype) is taken as its program computes it.
"""
