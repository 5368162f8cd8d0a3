"""What attacks do to texts: words and characters that they change, likelihoods that they lower."""
