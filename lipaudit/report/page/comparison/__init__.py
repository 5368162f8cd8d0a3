"""A comparison of reports as a page: what changed first, then every figure, sample and head."""
