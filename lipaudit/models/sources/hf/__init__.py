"""Models of transformers: a directory with config.json, or a model at hand, to a `ModelSpec`."""
