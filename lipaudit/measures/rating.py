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


def compute_calibration_error(confidence: Values, correct: Values) -> float:
    """Return the expected calibration error (Guo et al., arXiv 1706.04599).

    Bin m of 15 holds the samples with a confidence in ((m - 1) / 15, m / 15]. The error is the sum
    over bins of |number of correct samples - sum of confidences| / samples.

    Args:
        confidence: of each prediction, in [0, 1], (samples,).
        correct: whether the prediction is right, (samples,).
    """
    import numpy as np

    bins = np.ceil(confidence * BINS).astype(int).clip(1, BINS)
    # The sum of (correct - confidence) in each bin: `bincount` adds up its second argument.
    gaps = np.bincount(bins, correct - confidence.astype(float))
    total = np.abs(gaps).sum()
    return float(total / len(correct))


def find_worst_classes(label: Values, robust: Values, known: dict[str, str]) -> dict[str, Any]:
    """Find the class with the lowest accuracy in each trial; return its accuracy and name.

    These are two columns with a value per trial. No columns if every class has too few samples.

    Args:
        label: true classes, (samples,).
        robust: whether samples are right under attack, (samples, trials).
        known: names of classes by number.
    """
    import numpy as np

    # `classes` are the different labels, and classes[class_of_sample] is `label` again.
    classes, class_of_sample, counts = np.unique(label, return_inverse=True, return_counts=True)
    # The class with the most samples first: among classes of equal accuracy, `argmin` takes it.
    by_count = np.argsort(-counts, kind="stable")
    rated = [i for i in by_count if counts[i] >= FEWEST_OF_CLASS]
    if not rated:
        return {}
    texts = []
    for i in rated:
        name = known.get(str(classes[i]), classes[i])
        texts.append(f"{name} ({counts[i]} samples)")
    # Number of robust samples of each class, (trials, classes): `bincount` adds up `of_trial`.
    right = np.stack([np.bincount(class_of_sample, of_trial) for of_trial in robust.T])
    accuracies = right[:, rated] / counts[rated]
    worst = accuracies.argmin(1)
    return {"robust_class": accuracies.min(1), "class": [texts[i] for i in worst]}
