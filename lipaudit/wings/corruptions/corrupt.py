"""The measure `corrupt`: accuracy under common corruptions of images, and random typing errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, PlainSerializer

from lipaudit.attacks.kinds import TYPING
from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import base
from lipaudit.measures.base import Measure, MeasureOptions, Part, Values
from lipaudit.settings.option import option
from lipaudit.settings.value_types import read_list
from lipaudit.tables import Column, Display, Layout, Note, Reduction, Report, Row, Section
from lipaudit.tables.columns import OUTCOMES, limit_columns
from lipaudit.tables.summary import Headline, declare_clean, read_row
from lipaudit.tables.trials import COUNTED, Norm
from lipaudit.wings.corruptions.published import PUBLISHED, find_published, read_corruptions

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

SEVERITIES = range(1, 6)


def list_corruptions(kind: str = "") -> tuple[str, ...]:
    """Return the corruptions of a kind of model (image, tokens or text); of all by default."""
    images = tuple(read_corruptions())
    return {"": images + TYPING, "image": images, "text": TYPING}.get(kind, ())


def _find_corruptions(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the corruptions with the typed names; `jpeg` is short for jpeg_compression.

    None, if no name was typed, means all corruptions.
    """
    if not names:
        return None
    known = list_corruptions()
    for name in names:
        if name == "frost":
            raise UsageError("frost needs photographs of frost, which lipaudit does not have")
        if sum(corruption.startswith(name) for corruption in known) != 1:
            raise UsageError(f"there is no corruption {name!r}", suggestion(name, known))
    # `startswith` takes a tuple: any of these beginnings.
    return tuple(corruption for corruption in known if corruption.startswith(names))


# Reports hold texts, which a comparison wants to be equal: with other corruptions or severities
# the mean is another figure. (Lists may become longer.)
Corruptions = Annotated[
    tuple[str, ...] | None,
    read_list,
    AfterValidator(_find_corruptions),
    PlainSerializer(lambda names: names and ", ".join(names)),
]
Severities = Annotated[
    tuple[Annotated[int, Field(ge=SEVERITIES[0], le=SEVERITIES[-1])], ...],
    read_list,
    Field(min_length=1),
    PlainSerializer(lambda levels: ",".join(map(str, sorted(levels)))),
]


class CorruptOptions(MeasureOptions):
    """Accuracy under common corruptions: noise, blur, weather, JPEG; of texts, typing errors.

    Images get the corruptions of ImageNet-C at severities 1 to 5, with the published parameters
    for the nearest image size. Texts get 1 to 5 random typing errors of one kind. Each sample
    takes a forward pass for every corruption and severity.

    Examples:
      lipaudit corrupt demo
      lipaudit corrupt timm:vit_small_patch16_224 --data val/
      lipaudit corrupt ./vit --data val/ --corruption fog,jpeg --severity 3
      lipaudit corrupt ./bert --data reviews.csv
    """

    samples: ClassVar[int] = 128
    labelled: ClassVar[bool] = True
    deploys: ClassVar[bool] = True

    corruption: Corruptions = option(
        None, "Corruptions, such as gaussian_noise,jpeg. Default: all.", values=list_corruptions
    )
    severity: Severities = option("1,2,3,4,5", "Severities; for texts numbers of typing errors.")

    def adapt(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options with corruptions: the typed ones, else all for this kind of model.

        Args:
            kind: what the model takes: image, tokens or text.
            changes: what can be changed in the texts of this model: words, characters or a suffix;
                by default, all three.
            why: the reason if characters cannot be changed, for the message.

        Raises:
            UsageError: this kind of model has no corruptions, or lacks a typed corruption.
        """
        if kind == "text" and "characters" not in changes:
            raise UsageError(f"typing errors are not possible for this model: {why}")
        suitable = list_corruptions(kind)
        if not suitable:
            raise UsageError(f"corrupt is not for {kind} models", "There are: none.")
        for name in self.corruption or ():
            if name not in suitable:
                text = f"--corruption {name} is not for {kind} models"
                raise UsageError(text, f"There are: {', '.join(suitable)}.")
        return self.model_copy(update={"corruption": self.corruption or suitable})

    @property
    def copies(self) -> list[tuple[str, int]]:
        """Return corruption and severity of every corrupted copy of a sample."""
        return list(product(self.corruption or (), self.severity))


rate_column = partial(Column.share, status="estimate")
# Without a better direction: a comparison lists the means over severities alone.
severity_column = partial(
    rate_column, meaning="At this severity; of texts: number of errors.", format=".0%", better=None
)
LEVELS = [f"severity_{level}" for level in SEVERITIES]


def read_mean(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the main figure of the section: the mean accuracy over corruptions (row `mean`)."""
    for row in section.rows:
        if row.corruption == "mean":
            yield from read_row(headline, section, row)


CORRUPT_TABLE = Layout(
    name="corrupt",
    title="Does it survive common corruptions?",
    headlines=(
        declare_clean(13),
        Headline(
            name="corrupted_accuracy",
            column="accuracy",
            label="accuracy under corruptions",
            meaning="Mean share of the corrupted copies that are right.",
            place=14,
            read=read_mean,
            rule="corrupt.accuracy@mean >= -2pp",
        ),
    ),
    display=Display(
        about="Accuracy on corrupted copies of the samples, with 95% limits: mean over the "
        "severities, then at each severity. worst: right at every severity.",
        columns=("corruption", "accuracy", "worst", *LEVELS),
        folded=False,
    ),
    sample_columns={"correct": OUTCOMES["correct"]},
    fixed={
        "corruption": Column.text("corruption", "mean: mean over those that follow.", needed=True),
        "accuracy": rate_column(
            "accuracy",
            "Share of the corrupted copies that are classified correctly.",
            reading="The mean is not divided by the errors of AlexNet, as the mCE of ImageNet-C "
            "is. The limits count a sample with all of its copies as one observation.",
            reduction=Reduction("mean", "accuracy"),
        ),
        **limit_columns("accuracy"),
        "drop": rate_column("drop", "Share of the clean accuracy that is lost.", better="lower"),
        "worst": rate_column(
            "worst",
            "Share of the samples of which every copy is right.",
            better=None,  # as of a severity
            reduction=Reduction("mean", "worst"),
        ),
        **{name: severity_column(name[-1], reduction=Reduction("mean", name)) for name in LEVELS},
        "samples": Column.count("samples", "Number of samples."),
    },
)


def measure(net: Net, batches: Iterable[Batch], options: CorruptOptions) -> Iterator[Part]:
    """Yield whether each sample, and each of its corrupted copies, is classified correctly."""
    import torch

    predict = _predict_texts
    notes: tuple[Note, ...] = ()
    if net.kind == "image":
        predict = _predict_images
        notes = (_note_severities(max(net.input_shape[1:])),)
    levels = len(options.severity)
    for batch in batches:
        y = check(net, batch, options)  # the labels
        with torch.no_grad():
            predicted = net.output(batch).argmax(1)
            # The result without corruption is repeated for each severity: all rows have one shape.
            right = [predicted == y] * levels
            # One corruption after the other, each at all severities.
            for number, classes in enumerate(predict(net, batch, options), start=1):
                right.append(classes == y)
                share = number / len(options.copies)
                base.report_progress(len(batch) * share)
        values = torch.stack(right, 1).cpu().numpy()
        # (samples, 1 + corruptions, severities); index 0 of axis 1 is without corruption.
        values = values.reshape(len(batch), -1, levels)
        yield Part(batch.ids, {"right": values}, notes=notes)


def _note_severities(side: int) -> Note:
    """Return the note that names the published set whose severities images of a side get."""
    published = find_published(side)
    text = (
        f"severities are those of {PUBLISHED[published]}, for {published} px; these images "
        f"have {side} px. frost, its 15th corruption, needs photographs: it is left out"
    )
    return Note.info("published-severities", text)


def _predict_images(net: Net, batch: Batch, options: CorruptOptions) -> Iterator[Tensor]:
    """Yield the predicted classes of a batch of images, once for each corruption and severity."""
    import torch

    from lipaudit.data.arrays import to_box
    from lipaudit.wings.corruptions.images import corrupt_image

    # Corruptions take pixels in [0, 1]; the box of the model may be another one.
    low, high = net.box or (0.0, 1.0)
    seeds = options.list_seeds(batch.ids)
    pixels = batch.x.cpu().double().numpy()
    pixels = (pixels - low) / (high - low)
    pixels = pixels.clip(0, 1)  # in float32, the ends of the box may be rounded outwards
    for name, level in options.copies:
        copies = []
        for image, seed in zip(pixels, seeds, strict=True):
            corrupted = corrupt_image(image, name, level, seed)
            copies.append(torch.tensor(corrupted))
        x = to_box(torch.stack(copies), net.box)
        output = net.output(replace(batch, x=x.to(batch.x)))
        yield output.argmax(1)


def _predict_texts(net: Net, batch: Batch, options: CorruptOptions) -> Iterator[Tensor]:
    """Yield the predicted classes of a batch of texts, once for each kind and number of errors.

    Texts with errors are cut to what the model takes.
    """
    from lipaudit.attacks.text import TextOracle
    from lipaudit.measures import texts
    from lipaudit.wings.corruptions.typing_errors import mistype

    original = texts.read_texts(texts.make_reader(net), batch, characters=True)
    # With `reads_padding`, the model gets texts of one length at a time. The flag is set for every
    # model, so that no figure depends on padding.
    reader = replace(original.reader, reads_padding=True)
    seeds = options.list_seeds(batch.ids)
    oracle = TextOracle(reader, len(batch))
    for name, level in options.copies:
        copies = []
        for draft, seed in zip(original.drafts, seeds, strict=True):
            rng = Random(f"{seed} {name} {level}")
            changed = mistype(draft, rng, reader.lexicon, kind=name, count=level)
            copies.append(reader.read(changed, cut=True))
        yield oracle(copies).argmax(1)  # of logits


def check(net: Net, batch: Batch, options: CorruptOptions) -> Tensor:
    """Return the labels; refuse a model without classes, or a sample without a label."""
    base.require_decision(net, "Give a classifier.")
    return base.require_labels(batch, "corrupt")


def summarise(parts: Sequence[Part], options: CorruptOptions) -> list[Section]:
    """Make the section `corrupt`: rows of the clean samples, the mean, and each corruption."""
    import numpy as np

    unique = base.mark_unique(parts)  # repeats of a sample do not count
    # (samples, 1 + corruptions, severities): 1 where the prediction is right. The first row is of
    # the clean samples.
    right = base.join_parts(parts, "right") * 1.0
    figures = _collect_figures(right, options)
    cells = {name: values[unique].mean(0) for name, values in figures.items()}
    limits = base.make_share_columns("accuracy", figures["accuracy"][unique])
    # NaN in place of a clean accuracy of 0, which would divide by zero in `drop`.
    clean_accuracy = cells["accuracy"][0] or np.nan
    rows = base.make_rows(
        CORRUPT_TABLE,
        corruption=["clean", "mean", *(options.corruption or ())],
        **cells | limits,
        drop=1 - cells["accuracy"] / clean_accuracy,
        samples=int(unique.sum()),
    )
    notes = [*base.note_repeats(parts), *base.notes(parts)]
    clean = {"correct": right[:, 0, 0]}
    section = base.make_section(
        CORRUPT_TABLE, parts, options, rows, notes, samples=clean, arrays=figures
    )
    return [section]


def _collect_figures(right: Values, options: CorruptOptions) -> dict[str, Values]:
    """Return the figures of every sample by column, (samples, rows) each.

    The rows are: clean, the mean of all corruptions, and each corruption.

    Args:
        right: 1 where a prediction is right, else 0, (samples, 1 + corruptions, severities). Index
            0 of axis 1 is the clean sample.
        options: the options of the run.
    """
    import numpy as np

    # (samples, rows, severities): between clean and the corruptions, the mean of the corruptions.
    corrupted = right[:, 1:]
    outcomes = np.insert(right, 1, corrupted.mean(1), axis=1)
    figures = {}
    for i, severity in enumerate(options.severity):
        figures[f"severity_{severity}"] = outcomes[..., i]
    figures["accuracy"] = outcomes.mean(2)
    figures["worst"] = outcomes.min(2)  # 1 if the prediction is right at every severity
    figures["worst"][:, 1] = corrupted.min((1, 2))  # row `mean`: right under every corruption
    return figures


CORRUPT = Measure(
    "corrupt",
    (CORRUPT_TABLE,),
    CorruptOptions,
    measure,
    summarise,
    batch=32,
    check=check,
    place=42,
)
