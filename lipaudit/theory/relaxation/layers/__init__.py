"""Operations in terms of the basic ones: extremes, sums over many axes, heads, further curves."""
