"""Fine-tuning with a penalty on attention, or against attacks; and watching a training."""
