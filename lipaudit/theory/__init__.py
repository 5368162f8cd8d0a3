"""The mathematics: functions from tensors to tensors, without knowledge of models."""
