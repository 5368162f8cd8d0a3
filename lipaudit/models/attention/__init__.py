"""The attention of any model: `survey.surveyed` names its layers, `capture.capture` reads them.

`observe` meets attention calls and linear maps while the unmodified model runs, `project` recovers
from their autograd graphs which linear maps of the tokens make q, k, v and the logits, and
`to_heads` puts both together as the `Heads` of the theory.
"""
