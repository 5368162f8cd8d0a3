"""Recover the linear maps of the tokens behind q, k, v and the logits, from autograd graphs.

`projections` decodes them once, and applies them to every batch. `logits` reads the terms beside q
k^T. `probes` queries the graph.
"""
