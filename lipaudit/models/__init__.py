"""Checkpoints. Three functions matter, each the door of a room.

`sources.loading.load_net` turns a name into a checked `Net`; `attention.capture.capture` reads
the attention of its layers, which `attention.survey.find_layers` finds once;
`derivative.linearize.linearize` runs it as a linear map.
"""
