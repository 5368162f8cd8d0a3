"""Figures of a classifier beside its accuracy: calibration, and its worst class."""

from __future__ import annotations

from typing import Any

from lipaudit.measures.base import Values

# Number of bins of the calibration error in Guo et al. (arXiv 1706.04599).
BINS = 15
# Number of samples from which it is shown: of fewer, a bin has less than two samples on average,
# and a sample alone in its bin counts with its own distance from 0 or 1, however well calibrated.
FEWEST_RATED = 2 * BINS
# Number of samples from which a class can be the worst: of 1 or 2, one is often all wrong.
FEWEST_OF_CLASS = 5


def calibration_error(confidence: Values, correct: Values) -> float:
    """Return the expected calibration error of samples with these confidences in [0, 1].

    Bin m of 15 holds confidences in ((m - 1) / 15, m / 15]; the error is the sum over bins of
    |number of correct samples - sum of confidences| / samples (Guo et al., arXiv 1706.04599).
    """
    import numpy as np

    bins = np.ceil(confidence * BINS).astype(int).clip(1, BINS)
    gaps = np.bincount(bins, correct - confidence.astype(float))
    total = np.abs(gaps).sum()
    return float(total / len(correct))


def find_worst_classes(label: Values, robust: Values, known: dict[str, str]) -> dict[str, Any]:
    """Return the columns of the class with the lowest accuracy in each trial: accuracy and name.

    No columns if every class has too few samples for an accuracy.

    Args:
        label: true classes, (samples,).
        robust: whether samples are right under attack, (samples, trials).
        known: names of classes by number.
    """
    import numpy as np

    # The classes, the position of each sample's class among them, and the samples of each class.
    numbers, index, counts = np.unique(label, return_inverse=True, return_counts=True)
    # The class with the most samples first: among classes of equal accuracy, `argmin` takes it.
    order = [i for i in np.argsort(-counts, kind="stable") if counts[i] >= FEWEST_OF_CLASS]
    if not order:
        return {}
    texts = []
    for i in order:
        name = known.get(str(numbers[i]), numbers[i])
        texts.append(f"{name} ({counts[i]} samples)")
    # (trials, classes): the number of robust samples of each class, then their share.
    right = np.stack([np.bincount(index, of_trial) for of_trial in robust.T])
    shares = right[:, order] / counts[order]
    worst = shares.argmin(1)
    return {"robust_class": shares.min(1), "class": [texts[i] for i in worst]}
