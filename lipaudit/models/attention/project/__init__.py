"""Which linear maps of the tokens make q, k, v and the logits: read from autograd graphs.

`decode` says how, and works out once what a projection is (`forms`); `projected` builds it on a
batch; `probes` asks the graph; `logits` and `positions` read what stands beside q k^T; `chains`
finds linear maps in a row.
"""
