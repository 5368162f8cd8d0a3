"""The attention of any model: `survey.find_layers` finds its layers, `capture.capture` reads them.

`events` recognises attention calls, op by op, while the unmodified model runs, and `contractions`
reads its linear maps.
`trace` cuts the graph there and numbers them, `calls` holds the results, and `uses` counts
attention that `events` does not recognise. `scope` finds the module of a layer, and `loops` calls
that compute one head each. `projections` and
`logits` recover, from the autograd graphs, the linear maps of the tokens behind q, k and v, and
the terms beside q k^T. `capture` combines all into the `Heads` of the theory.
"""
