"""Which linear maps of the tokens make q, k, v and the logits: read from autograd graphs.

`projections` says how, once and then on every batch; `logits` reads what stands beside q k^T;
`probes` asks the graph.
"""
