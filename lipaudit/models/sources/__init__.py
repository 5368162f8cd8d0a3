"""Names of checkpoints, and the checked `Net` that each gives: `loading.load_net` is the door."""
