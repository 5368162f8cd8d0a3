"""The measure `smoothing`, which `certify --smooth` runs: certificates by votes under noise.

Source: Cohen, Rosenfeld and Kolter, *Certified Adversarial Robustness via Randomized Smoothing*,
arXiv 1902.02918, ICML 2019, theorem 1 and the function CERTIFY.

The smoothed classifier g gives x the class that f gives most often to x + N(0, sigma^2 I). If f
gives that class with probability at least p > 1/2, then g gives it to every input that is nearer
to x than R = sigma Phi^-1(p) in L2. The reason: p(x) = P(f(x + noise) = class) makes Phi^-1(p(x))
a function of Lipschitz constant 1 / sigma, and the class has a majority while p > 1/2.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from lipaudit.errors import EvaluationError, UsageError
from lipaudit.measures import base
from lipaudit.measures.attack import eps_column, seconds_column
from lipaudit.measures.base import Arrays, Measure, MeasureOptions, Part
from lipaudit.settings.option import option, repeat_option
from lipaudit.settings.value_types import Balls, TwoCounts
from lipaudit.tables import Column, Display, Layout, Note, Reduction, Row, Section
from lipaudit.tables.columns import ACCURACY, CERTIFIED_SHARE, OUTCOMES, limit_columns
from lipaudit.tables.summary import CLEAN_OF_BALLS, Headline
from lipaudit.tables.trials import Norm, parse_radius

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

# Number of samples whose copies share passes; each has a Part of its own.
SAMPLES_PER_PASS = 4


class SmoothingOptions(MeasureOptions):
    """Certificates of the smoothed classifier, which takes the majority vote under noise.

    The smoothed classifier gives the class that the model gives most often to noisy copies of a
    sample. Each certificate holds with probability 1 - alpha, and only for that classifier. The
    command is `lipaudit certify MODEL --smooth SIGMA`.

    Example: lipaudit certify demo --smooth 0.25
    """

    labelled: ClassVar[bool] = True

    eps: Balls = option((), "L2 radii for pixels in [0, 1] or token embeddings.")
    smooth: float | None = option(
        None,
        "Certify the vote of the model under Gaussian noise of this deviation, in L2.",
        gt=0,
        allow_inf_nan=False,
    )
    noise_samples: TwoCounts = option(
        "100,1000", "N0,N: noisy copies to choose and to certify the class.", rare=True
    )
    alpha: float = option(0.001, "Probability that a certificate is wrong.", gt=0, lt=0.5)
    denoiser: str | None = option(
        None,
        "py:FILE:FACTORY of an nn.Module that removes the noise before the model.",
        kinds=("image", "tokens"),
    )
    # Hash of the source and the weights of the denoiser: with others it is another classifier.
    denoiser_sha256: str | None = None
    # Number of noisy copies in a pass; no effect on results.
    batch_size: int = Field(64, exclude=True)

    @property
    def copies(self) -> tuple[int, ...]:
        """Return the numbers of noisy copies that choose the class and that certify it."""
        return tuple(map(int, self.noise_samples.split(",")))

    def adapt(self, kind: str, changes: Sequence[Norm] = (), why: str = "") -> Self:
        """Return the options with default radii in units of the noise, and the denoiser's hash.

        The arguments are those of all measures; smoothing needs none of them.

        Raises:
            UsageError: there is no noise, or the reference of the denoiser is malformed.
            InputError: the denoiser cannot be loaded.
        """
        from lipaudit.wings.certificates.denoiser import hash_denoiser

        if self.smooth is None:
            raise UsageError("smoothing needs noise", "Use lipaudit certify --smooth 0.25.")
        eps = self.eps
        if not eps:  # in units of the noise
            eps = tuple(parse_radius(f"{share * self.smooth:.4g}") for share in (0.5, 1, 2))
        digest = None
        if self.denoiser:
            digest = hash_denoiser(self.denoiser)
        return self.model_copy(update={"eps": eps, "denoiser_sha256": digest})


# What holds of the smoothed classifier holds of no other, and not for certain.
SMOOTHED_DOMAIN = "the smoothed classifier in the ball, with probability 1 - alpha"
SMOOTHED_READING = (
    "Each certificate holds with probability 1 - alpha, not all at once; the model has none."
)
CERTIFIED = replace(CERTIFIED_SHARE, domain=SMOOTHED_DOMAIN, reading=SMOOTHED_READING)
_share_column = partial(Column.share, status="empirical")

SMOOTHING_TABLE = Layout(
    name="smoothing",
    title="What is certified of the smoothed classifier?",
    headlines=(
        CLEAN_OF_BALLS,
        Headline(
            name="smoothed_accuracy",
            column="certified",
            label="smoothed certified",
            words="smoothed certified accuracy",
            meaning="Share certified for the vote under noise, each at 1 - alpha.",
            place=31,
            rule="smoothing.certified >= -2pp",
        ),
    ),
    display=Display(
        about="The smoothed classifier takes the majority vote of the model on noisy copies. With "
        "probability 1 - alpha, no change of L2 size eps changes a certified vote.",
        columns=("norm", "eps_text", "clean", "noisy", "smoothed", "certified", "abstained"),
        histograms=("radius",),
        titles={"radius": "How far around each sample the vote is certified"},
        worst=("radius",),
        folded=False,
    ),
    sample_columns={
        # The predicted class is empty where the smoothed classifier abstains.
        **{name: OUTCOMES[name] for name in ("label", "predicted", "correct")},
        "votes": Column.count("votes", "Noisy copies, of N, with the class that N0 others chose."),
        "share": Column(
            "share",
            "Lower limit of the share of noisy copies with this class (Clopper-Pearson).",
            status="estimate",
        ),
        "radius": Column(
            "smoothed radius",
            "L2 radius in which the smoothed classifier keeps its class; 0 if it abstains.",
            better="higher",
            domain=SMOOTHED_DOMAIN,
            status="certified",
        ),
        "certified": replace(CERTIFIED, format="d"),
    },
    fixed={
        "norm": Column.text("norm", "Norm of the ball: l2.", needed=True),
        "eps": eps_column("Radius, for pixels in [0, 1] or token embeddings."),
        **{name: ACCURACY[name] for name in ("eps_text", "samples")},
        "clean": _share_column("clean", "Accuracy of the model without noise or denoiser."),
        "noisy": _share_column("noisy", "Accuracy on single noisy copies, behind any denoiser."),
        "smoothed": _share_column(
            "smoothed",
            "Accuracy of the smoothed classifier; where it abstains, it is wrong.",
            reduction=Reduction("mean", "correct"),
        ),
        "certified": CERTIFIED,
        **limit_columns("certified"),
        "abstained": Column.count("abstained", "Samples without a proven majority of the votes."),
        "seconds": seconds_column("Wall time."),
    },
)


def measure(net: Net, batches: Iterable[Batch], options: SmoothingOptions) -> Iterator[Part]:
    """Yield a part with the votes of each sample: how many noisy copies get each class.

    The first N0 noisy copies of a sample choose a class. Another N copies estimate the probability
    of this class: an estimate on the copies that chose the class would be too high.
    """
    from lipaudit.wings.certificates.denoiser import add_denoiser

    denoised = net
    if options.denoiser is not None:
        denoised = add_denoiser(net, options.denoiser)
    # Noise has the shape of its sample. Texts of a batch are padded, so they run one by one.
    size = 1 if net.kind == "text" else SAMPLES_PER_PASS
    small_batches = chain.from_iterable(batch.split(size) for batch in batches)
    for number, batch in enumerate(small_batches):
        if number == 0:
            per_copy = _time_copy(denoised, batch, options)
            base.report_cost(sum(options.copies), per_copy, "noisy copies")
        yield from _measure_samples(net, denoised, batch, options)


def _measure_samples(
    net: Net, denoised: Net, batch: Batch, options: SmoothingOptions
) -> Iterator[Part]:
    """Yield a part for each sample of a small batch: its votes, and the time they took.

    Args:
        net: the model, whose prediction without noise is stored as well.
        denoised: the model behind any denoiser, which gets the noisy copies.
        batch: labelled samples.
        options: the options of the run.
    """
    import numpy as np
    import torch

    labels = base.require_labels(batch, "certify --smooth")
    with torch.no_grad():
        clean = net.output(batch).argmax(1) == labels
    start = time.perf_counter()
    for i, votes in enumerate(count_votes(denoised, batch, options)):
        seconds = time.perf_counter() - start
        index = slice(i, i + 1)  # arrays of a part have an axis of samples, here of size 1
        arrays = {
            "label": labels[index].cpu().numpy(),
            "clean": clean[index].cpu().numpy(),
            "votes": votes[None].numpy(),  # (1, 2, classes): of the N0 and of the N copies
            "seconds": np.array([seconds]),
        }
        chosen = arrays["votes"][:, 0].argmax(1)  # the class with most of the N0 votes
        names = base.name_classes(net, arrays["label"], chosen)
        yield Part((batch.ids[i],), arrays, {"classes": names})
        # The caller writes the part to disk before it requests the next one: this time must not
        # count as time of the next sample.
        start = time.perf_counter()


def count_votes(net: Net, batch: Batch, options: SmoothingOptions) -> Iterator[Tensor]:
    """Yield, for each sample, how many of its noisy copies the model puts into each class.

    The first N0 copies of a sample choose its class, and the next N estimate the probability of
    this class. So votes are counted separately for the N0 and the N copies. All copies of all
    samples are numbered in a row, sample by sample, and run in passes of `options.batch_size`
    copies: a pass may have copies of several samples. Gaussian noise is added to pixels in [0, 1],
    without clipping afterwards, or to token embeddings. Each sample has its own CPU generator, so
    the noise of a copy does not depend on batches or devices.

    Yields:
        Counts (2, classes), of the N0 and of the N copies, as soon as a sample is done.

    Raises:
        EvaluationError: the output for a copy is not finite.
    """
    import torch

    point = net.point(batch)
    selecting, estimating = options.copies
    copies_per_sample = selecting + estimating
    generators = [torch.Generator().manual_seed(seed) for seed in options.list_seeds(batch.ids)]
    counts = torch.zeros(len(batch), 2, net.classes or 0, dtype=torch.long)
    finished = 0  # number of samples whose counts were yielded
    total = len(batch) * copies_per_sample
    for start in range(0, total, options.batch_size):
        copies = torch.arange(start, min(start + options.batch_size, total))  # numbers in a row
        sample_of_copy = copies // copies_per_sample
        noise = _draw_noise(point, [generators[i] for i in sample_of_copy.tolist()])
        rows = sample_of_copy.to(point.device)
        classes = _classify_copies(net, batch.rows_without_ids(rows), point[rows], noise, options)
        # 0 for the N0 copies that choose the class, 1 for the N copies that estimate it.
        stage = (copies % copies_per_sample >= selecting).long()
        # counts[sample, stage, class] += 1 for every copy.
        counts.index_put_((sample_of_copy, stage, classes), torch.tensor(1), accumulate=True)
        done = (int(copies[-1]) + 1) / copies_per_sample  # samples; the last one may be half done
        base.report_progress(done - finished)
        yield from counts[finished : int(done)]
        finished = int(done)


def _draw_noise(point: Tensor, generators: Iterable[torch.Generator]) -> Tensor:
    """Return standard normal noise for copies of samples, (copies, *shape of a sample).

    `point` has the samples, and `generators` the CPU generator of the sample of each copy.
    """
    import torch

    draws = [torch.randn(point.shape[1:], generator=g, dtype=torch.float32) for g in generators]
    return torch.stack(draws).to(point)


def _classify_copies(
    net: Net, batch: Batch, point: Tensor, noise: Tensor, options: SmoothingOptions
) -> Tensor:
    """Return the class that the model gives to each sample under noise, on the CPU.

    Args:
        net: the model.
        batch: the samples.
        point: the samples without noise: pixels, or token embeddings.
        noise: standard normal noise, of the shape of `point`.
        options: the options of the run.
    """
    import torch

    # Padding of texts gets no noise. The mask is (batch, tokens); None: everything may change.
    free_tokens = net.find_free_tokens(batch)
    if free_tokens is not None:
        noise = noise * free_tokens[..., None]
    with torch.no_grad():
        z = point + (options.smooth or 0.0) * noise
        logits = net.forward(z, batch).cpu()
    if not bool(logits.isfinite().all()):
        raise EvaluationError(
            f"the model's output is not finite under noise of {options.smooth}",
            "Try --dtype float64, or less noise.",
        )
    return logits.argmax(1)


def _time_copy(net: Net, batch: Batch, options: SmoothingOptions) -> float:
    """Return the seconds per noisy copy, measured in a pass of eight copies."""
    few = options.model_copy(update={"noise_samples": "1,7"})  # N0,N
    for _ in range(2):  # the first pass compiles kernels and fills caches
        start = time.perf_counter()
        next(count_votes(net, batch[:1], few))
    return (time.perf_counter() - start) / sum(few.copies)


def limit_share(
    votes: Int[np.ndarray, " samples"], copies: int, alpha: float
) -> Float[np.ndarray, " samples"]:
    """Return the lower limit of each class's probability (Clopper and Pearson, 1934).

    The limit is the p with P(B >= votes) = alpha for B ~ Binomial(copies, p), the alpha-quantile
    of Beta(votes, copies - votes + 1). With probability 1 - alpha the true probability of the
    class is at least p.

    Args:
        votes: how many noisy copies got the class; the class was chosen without them.
        copies: number of noisy copies.
        alpha: probability that the limit is too high.

    >>> import numpy as np
    >>> limit_share(np.array([0, 100]), 100, 0.001).round(4)
    array([0.    , 0.9333])
    """
    import numpy as np
    from scipy.special import betaincinv

    # Beta(0, ...) is not a distribution: without votes the limit is 0.
    limit = betaincinv(np.maximum(votes, 1), copies - votes + 1, alpha)
    return np.where(votes > 0, limit, 0.0)


def certify_radius(
    share: Float[np.ndarray, " samples"], sigma: float
) -> Float[np.ndarray, " samples"]:
    """Return the L2 radius sigma Phi^-1(p) in which the class is certified; 0 if p <= 1/2.

    Args:
        share: lower limit p of the class's probability under noise.
        sigma: standard deviation of the noise.
    """
    import numpy as np
    from scipy.special import ndtri

    return np.maximum(sigma * ndtri(share), 0.0)


def check(net: Net, batch: Batch, options: SmoothingOptions) -> None:
    """Refuse a model or samples that randomized smoothing cannot certify.

    Raises:
        InputError: the model has no classes, the samples have no labels, or the denoiser fails on
            the first sample.
    """
    base.require_decision(net, "Certify a classifier.")
    base.require_labels(batch, "certify --smooth")
    if options.denoiser is not None:
        from lipaudit.wings.certificates.denoiser import add_denoiser

        # A run on the first sample: a denoiser that fails does so before the measurement.
        add_denoiser(net, options.denoiser).output(batch[:1].to(net.device, net.dtype))


def summarise(parts: Sequence[Part], options: SmoothingOptions) -> list[Section]:
    """Return the section of the report: a row per radius, votes and radius of every sample."""
    import numpy as np

    arrays = base.join_arrays(parts)
    columns = _certify_samples(arrays, options)
    # The theorem holds for inputs nearer than the certified radius: a closed ball of radius eps is
    # certified if eps is less.
    eps = [float(ball) for ball in options.eps]
    certified = columns["correct"][:, None] & (columns["radius"][:, None] > eps)
    # `votes` are (samples, 2, classes), of the N0 and of the N copies of a sample. Of the N
    # copies, the number that gets the label, (samples, 1).
    estimation = arrays["votes"][:, 1]
    right = np.take_along_axis(estimation, columns["label"][:, None], 1)
    _, estimating = options.copies  # N0, N
    unique = base.mark_unique(parts)  # a repeated sample counts once, as in every comparison
    rows = base.make_rows(
        SMOOTHING_TABLE,
        norm="l2",
        eps=eps,
        eps_text=[ball.text for ball in options.eps],
        samples=int(unique.sum()),
        clean=arrays["clean"][unique].mean(),
        noisy=right[unique].mean() / estimating,
        smoothed=columns["correct"][unique].mean(),
        **base.make_share_columns("certified", certified[unique]),
        # A radius of 0 says that no class has a proven majority: the classifier abstains.
        abstained=int((columns["radius"][unique] == 0).sum()),
        seconds=arrays["seconds"][unique].sum().round(3),
    )
    # Each row, a radius, has a column of flags of the samples, named like certified@l2,0.25.
    for row, flags in zip(rows, certified.T, strict=True):
        columns[row.trial.column("certified")] = flags
    notes = [*_write_notes(rows[0], options), *base.note_repeats(parts)]
    return [base.make_section(SMOOTHING_TABLE, parts, options, rows, notes, samples=columns)]


def _certify_samples(arrays: Arrays, options: SmoothingOptions) -> Arrays:
    """Return, by name of the column, what the votes of each sample prove.

    Args:
        arrays: results of the samples by name. `votes` are (samples, 2, classes): of the N0 copies
            that choose the class, and of the N copies that certify it.
        options: the options of the run.
    """
    import numpy as np

    selection, estimation = arrays["votes"].swapaxes(0, 1)
    chosen = selection.argmax(1)
    votes = estimation[np.arange(len(chosen)), chosen]
    share = limit_share(votes, options.copies[1], options.alpha)
    radius = certify_radius(share, options.smooth or 0.0)
    return {
        "label": arrays["label"],
        "correct": (chosen == arrays["label"]) & (radius > 0),
        "votes": votes,
        "share": share,
        "radius": radius,
        "predicted": np.where(radius > 0, chosen, np.nan),
    }


def _write_notes(row: Row, options: SmoothingOptions) -> Iterator[Note]:
    """Yield the notes of a smoothing section of a report.

    The first note says that the certificates hold for the smoothed classifier only, the second one
    names the largest possible radius. A model that is mostly wrong under noise gets a warning.

    Args:
        row: a row of the section.
        options: the options of the run.
    """
    import numpy as np

    copies = options.copies[1]
    # The largest radius possible with N copies: all votes are for one class, and p^N = alpha.
    (largest,) = certify_radius(np.array([options.alpha ** (1 / copies)]), options.smooth or 0.0)
    yield Note.info(
        "smoothed",
        "certificates are of the smoothed classifier, not of the model: use the same vote. Each "
        f"fails with probability at most {options.alpha:g}",
    )
    yield Note.info(
        "largest-radius",
        f"{copies:,} noisy copies certify no radius above {largest:.3g}: for larger "
        "ones, raise N of --noise-samples",
    )
    if row.noisy < 1 / 2:  # most samples then have no majority for their class
        yield Note.warn(
            "noise-untrained",
            f"the model is right on {row.noisy:.1%} of noisy copies: its vote certifies little. "
            "Use lipaudit train --noise, or --denoiser",
        )


SMOOTHING = Measure(
    "smoothing",
    (SMOOTHING_TABLE,),
    SmoothingOptions,
    measure,
    summarise,
    batch=64,
    chunk=SAMPLES_PER_PASS,
    check=check,
    command="certify",
    place=46,
    moved={
        "denoiser": repeat_option(
            SmoothingOptions,
            "denoiser",
            help="Where the baseline's denoiser is now.",
            usual="the one in the baseline",
            kinds=(),
        )
    },
)
