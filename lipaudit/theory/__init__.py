"""The mathematics: tensors in, tensors out; knows no model."""
