"""Checkpoints as functions that can be differentiated.

`sources.loader.load_net` turns a name into a checked `Net`. `attention.capture.capture` reads the
attention of the layers that `attention.survey.find_layers` finds once. `linearize.linearize`
returns the products of a model's Jacobian, `model_norms` its norms.
"""
