"""The attention of any model: `survey.find_layers` finds its layers, `capture.capture` reads them.

`observe` finds attention calls and linear maps while the unmodified model runs. `project`
recovers, from their autograd graphs, the linear maps of the tokens behind q, k, v and the logits.
`capture` combines both into the `Heads` of the theory.
"""
