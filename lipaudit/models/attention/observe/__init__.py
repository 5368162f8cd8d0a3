"""Find attention calls and linear maps while an unmodified model runs.

`linears` and `events` recognise them op by op, `trace` cuts the graph there and numbers them,
`calls` holds the results, and `uses` counts attention that the others do not recognise.
"""
