"""A job: a loaded model, its samples, and what is to be measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from lipaudit.cli.emit import check_outputs
from lipaudit.cli.options import Common
from lipaudit.data.sources import DataOptions, Samples, load_data
from lipaudit.errors import UsageError
from lipaudit.measures import MEASURES, Options
from lipaudit.models.net import Net
from lipaudit.models.sources.loading import LoadOptions, load
from lipaudit.results import Note


@dataclass(frozen=True)
class Job:
    """A loaded model, its samples, and what is to be measured on how many of them."""

    spec: str
    common: Common
    net: Net
    samples: Samples
    measures: Mapping[str, Options]
    counts: Mapping[str, int]
    notes: tuple[Note, ...]


def prepare(
    spec: str,
    common: Common,
    measures: Mapping[str, Options],
    *,
    skip_unlabelled: bool = False,
    counts: Mapping[str, int] | None = None,
) -> Job:
    """Load a model and its samples.

    Args:
        spec: the MODEL argument.
        common: the shared options.
        measures: which measures, with their options.
        skip_unlabelled: leave out, with a note, what needs labels where there are none.
        counts: how many samples each measure takes when --samples is not given.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    common = common.resolved()
    check_outputs(common, drawn=any(getattr(o, "map", None) for o in measures.values()))
    net = load(spec, load_options(common))
    wanted = {name: _count(name, common, counts or {}) for name in measures}
    samples = _samples(net, common, measures, wanted, skip_unlabelled)
    notes = net.info.notes + samples.notes
    if skip_unlabelled and samples.batch.y is None:
        notes += tuple(_skipped(name) for name in measures if MEASURES[name].labelled)
        measures = {name: o for name, o in measures.items() if not MEASURES[name].labelled}
    most = len(samples.batch)
    found = {name: min(wanted[name], most) for name in measures}
    return Job(spec, common, net, samples, measures, found, notes)


def _count(name: str, common: Common, counts: Mapping[str, int]) -> int:
    return common.samples or counts.get(name, MEASURES[name].samples)


def _skipped(name: str) -> Note:
    text = f"{name} was left out: it needs labelled samples (--data)"
    return Note(level="warning", code="no-labels", text=text)


def _samples(
    net: Net,
    common: Common,
    measures: Mapping[str, Options],
    wanted: Mapping[str, int],
    skip_unlabelled: bool,
) -> Samples:
    spec = common.data or ("demo" if net.info.source == "demo" else "random")
    labelled = any(MEASURES[name].labelled for name in measures)
    if labelled and spec == "random" and not skip_unlabelled:
        raise UsageError(
            "an attack needs labelled samples", "Name them with --data (a folder, .npz, .csv...)."
        )
    return load_data(spec, net, data_options(common, max(wanted.values())))


def data_options(common: Common, samples: int) -> DataOptions:
    """Return how to read so many samples."""
    return DataOptions(
        samples=samples,
        seed=common.seed or 0,
        max_tokens=common.max_tokens or DataOptions.max_tokens,
        text_column=common.text_column,
        label_column=common.label_column,
        offline=common.offline,
    )


def load_options(common: Common) -> LoadOptions:
    """Return how to load the model."""
    return LoadOptions(
        arch=common.arch,
        model_kwargs=_keywords(common.model_kwargs),
        mean=_numbers("--mean", common.mean),
        std=_numbers("--std", common.std),
        input_size=None if common.input_size is None else (common.input_size,),
        device=common.device or "auto",
        dtype=common.dtype or "float32",  # type: ignore[arg-type]  # loading refuses others
        offline=common.offline,
        tower=common.tower,
    )


def _keywords(text: str | None) -> dict[str, object]:
    """Read `k=v,...`; values are JSON where they can be, else strings."""
    pairs = [piece.partition("=") for piece in (text or "").split(",") if piece]
    for key, equals, _ in pairs:
        if not (key.strip().isidentifier() and equals):
            raise UsageError(f"--model-kwargs {text!r} is not k=v,...", "Example: depth=2")
    return {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _value(text: str) -> object:
    literals = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in literals:
        return literals[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a list of numbers", "Example: 0.5,0.5,0.5"
        ) from None


def tell(common: Common, notes: tuple[Note, ...]) -> None:
    """Print remarks on stderr as they arise; they are also in the report."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for note in () if common.quiet else notes:
        colour = "yellow" if note.level == "warning" else "dim"
        console.print(f"[{colour}]note:[/] {escape(note.text)}")
