"""What of a report goes out to others: a model card, a badge."""
