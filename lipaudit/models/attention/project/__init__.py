"""Which linear maps of the tokens make q, k, v and the logits: read from autograd graphs."""
