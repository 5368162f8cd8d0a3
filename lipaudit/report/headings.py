"""What stands under the headings of pages, and what names of the JSON hold that no column has."""

from __future__ import annotations

from collections.abc import Mapping

HEADINGS: Mapping[str, str] = {
    "What stands out": "Sentences drawn from the numbers, each with the rows that it comes from.",
    "How to read the figures": "What the standings mean, how the samples were preprocessed, and "
    "the versions of packages.",
    "Samples": "The ten worst samples: broken in most balls, then by their norm.",
    "All rows": "Every row and column of a section, as the JSON has them.",
    "Most amplifying heads": "The heads with the largest exact norms, and every bound as a "
    "multiple of it; all heads where they are few.",
    "All heads": "The exact norm of every head, and every bound as a multiple of it.",
    "Tightness over all heads": "How many times each bound lies above the exact norm: the median "
    "of the heads, and the largest of them.",
    "Upper bounds over the exact norm": "A point for every head and bound: no bound may lie below "
    "the line y = x.",
    "Exact ||J|| of every head": "A cell for every layer and head: which amplify most.",
    "Most intermediate heads": "The heads with the largest share of rows in the fragile regime.",
    "Strongest sinks": "Heads in which one key takes most of the attention, and its position.",
    "Share of rows in the intermediate (fragile) regime": "A cell for every layer and head.",
    "Largest and second largest entry of a row": "Where attention rows lie: uniform at the lower "
    "left, one-hot at the lower right, two equal peaks on top.",
    "Query of head": "How one query of one head attends to all keys, the mean over the samples.",
    "Attention map of head": "Which keys each query of one head attends to, on the first sample.",
    "g1 over the exact ||M||": "How many rows are bounded how tightly by g1; 1 is exact.",
    "Quantiles over samples": "How the norms of the samples are distributed.",
    "Most sensitive samples": "The samples with the largest Jacobian norms.",
    "Norms by position": "The Jacobian norms of the output at each position of a text, over the "
    "texts that have it.",
    "||J|| per sample": "How many samples have a value in each bin.",
    "Accuracy under attack": "The share of samples that withstood, by attack, norm and radius.",
    "Robust accuracy": "What is certified lies below it, what attacks left above.",
    "What is certified": "A bar for each ball, cut by the verdicts of its samples.",
    "Certified over adversarial radius": "A point for each sample: on the line y = x nothing is "
    "left open between what is proven and what attacks found.",
    "The worst samples": "The samples that are broken in most balls, then by their norm.",
    "Norm found as a multiple of exact": "Of every ball: how much larger a norm an ascent met "
    "than the one at the sample, and how loose the constants are that nothing there exceeds.",
    "On data": "Norms at the samples, cut to several lengths.",
    "At worst-case tokens": "The largest norms that any tokens of a length have, searched for.",
    "Worst-case tokens over the radius": "How the largest norm grows with the length of a token.",
    "Exponent of n": "By which power of the length norms and bounds grow.",
    "Changes and what is allowed": "Of a gate: each change that was tested, with its limits over "
    "a band of what the rule allows.",
    "Changes": "Changes that a gate tested, with their limits over a band of what is allowed.",
    "Values": "Current values with absolute limits, over a band of what is allowed.",
    "Verdicts": "Of a gate: what became of every rule.",
}
"""Headings of sections, tables and pictures, as far as they are always alike."""

FIELDS: Mapping[str, str] = {
    "ids": "The samples of the columns beside it, by a hash of their values and label.",
    "affine": "A kind of head: queries, keys and values are affine in the input, which closed "
    "forms need.",
    "local": "A kind of head: queries, keys or values are no affine function of the input, and "
    "bounds take their derivative at the samples.",
    "numerical": "A kind of head: its norm is taken numerically, and it has no bounds.",
    "one input": "In what a norm is taken: X, which queries, keys and values all read.",
    "queries apart": "In what a norm is taken: the input of the queries and that of keys and "
    "values, varied independently.",
    "keys and values": "In what a norm is taken: their input, the queries being constant.",
    "module input": "In what a norm is taken: all that the module around the layer takes.",
    "dense": "A method: the whole Jacobian was computed, and its norm by a decomposition.",
    "lanczos": "A method: the norm is met from below by products with the Jacobian.",
    "max_steps": "The most Lanczos steps that a norm may take.",
    "logical_chunk": "So many samples share the random numbers of an attack, whatever the batch.",
    "positions": "The Jacobian norm at every position of every text; NaN behind its end.",
    "g1_ratio_hist": "How many rows are bounded how tightly by g1: counts of the histogram.",
    "g1_ratio_edges": "The ends of the bins of that histogram.",
    "p1p2_hist": "How many rows have which largest and second largest entry: counts.",
    "p1p2_edges": "The ends of the bins of those counts.",
    "map": "An attention map; of long sequences the means of square blocks.",
    "row": "One row of an attention map, the mean over the samples.",
    "row_norms": "||M|| and g1 of that row.",
    "map_tokens": "How many queries and keys an attention map has before they are joined.",
    "size": "Channels, height and width of the images that the model takes.",
    "interpolation": "How images are brought to the model's size.",
    "crop_pct": "The share of a resized image that is kept.",
    "crop_mode": "Where the kept part of a resized image lies.",
}
"""Settings, arrays, methods and kinds in the JSON, and what is said of preprocessing."""
