"""Names of checkpoints, and the checked `Net` that each gives: `loading.load` is the door."""
