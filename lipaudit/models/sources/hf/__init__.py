"""Models of transformers: from a directory with config.json to a `Loaded` model."""
