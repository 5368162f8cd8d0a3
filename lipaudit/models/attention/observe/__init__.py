"""Find attention calls and linear maps while an unmodified model runs.

`linears` and `events` recognise them op by op, `trace` cuts the graph there and numbers them,
`calls` holds what was found, and `uses` counts attention that nothing else recognises.
"""
