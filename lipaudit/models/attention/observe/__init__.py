"""Meet attention calls and linear maps while an unmodified model runs.

`linears` and `events` recognise them op by op, `trace` cuts the graph there and numbers them,
`origins` knows what made each leaf of the cut graph, `layouts` the axes that models use.
"""
