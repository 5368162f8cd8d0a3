"""The attention of any model: `survey.find_layers` finds its layers, `capture.capture` reads them.

`observe` finds attention calls and linear maps while the unmodified model runs, `project` recovers
from their autograd graphs which linear maps of the tokens make q, k, v and the logits, and
`capture` puts both together as the `Heads` of the theory.
"""
