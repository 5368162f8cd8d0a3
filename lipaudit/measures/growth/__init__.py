"""Parts of the measure `scaling`: lengths of samples, power laws, the worst case."""
