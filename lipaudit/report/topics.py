"""The topics of `lipaudit explain`: one for every name on pages, in tables and in JSON.

Most topics are columns, measures and options, which describe themselves. The words that no
column explains stand at the end.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lipaudit.attacks.kinds import RESERVED, attack_kinds
from lipaudit.measures import find_column, layouts, list_headlines, load_measures
from lipaudit.report import cells
from lipaudit.settings.option import Settings
from lipaudit.tables import Column
from lipaudit.tables.plugins import load_wings

PIECES = re.compile(r"[@:,;=]+")
LIMIT = re.compile(r"(?:<=|>=).*")
ARGUMENTS = re.compile(r"(?<=module input) \(.*\)$")
NUMBER = re.compile(r"\s*\(?\b\d[\d./]*\)?")
"""Pattern of numbers in headings (row counts, heads, radii)."""


@dataclass(frozen=True)
class Topic:
    """The explanation of one name.

    Attributes:
        group: heading in the index; empty: not in the index.
        name: name in the index.
        title: title of the explanation.
        meaning: the meaning.
        details: further paragraphs: how to read it, what it does not say, its formula.
        words: other names.
    """

    group: str
    name: str
    title: str
    meaning: str
    details: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name that finds the topic."""
        return (self.name, self.title, *self.words)


FORMULA = "Formula: "
"""Beginning of a paragraph with a formula."""
SOURCE = "Source: "
"""Beginning of the line of a bound that names its source."""
DOMAINS = {"at X": "", "ball": "In the ball. "}
"""Sentences on where a figure holds; at X, the sentence on its status says it."""


@cache
def list_topics() -> tuple[Topic, ...]:
    """Return all topics, in the order of the index."""
    return (
        *_list_measures(),
        *_list_columns(),
        *_list_attacks(),
        *_list_headlines(),
        *_list_words(),
    )


def find_topics(text: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of a printed name; [] if it has none.

    Compound names (`jacobian.norm:median <= +5%`, `robust@pgd,linf,2/255`) give a topic for each
    part, except radii and other values.
    """
    name = ARGUMENTS.sub("", LIMIT.sub("", text)).strip() or text
    # A name may contain signs (g1/||M||): try the whole before its parts.
    whole = _find_named(text, known) or _find_named(name, known)
    if whole:
        return whole
    first, *more = map(str.strip, PIECES.split(name))
    bare = NUMBER.sub("", first)
    if more or bare != first:
        found = _find_named(bare, known)
        if found:
            for piece in more:
                # Of a name that several columns have, only the first part says which is meant.
                found += [t for t in _find_named(piece, known) if t.name == t.title]
            return list(dict.fromkeys(found))
    # A status and a domain in the form of footnotes: `exact at X`.
    status, _, domain = name.partition(" ")
    domains = _find_named(domain, known)
    if status not in cells.STATUS or not domains:
        return []
    return _find_named(status, known) + domains


def _find_named(name: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of a name: as it is spelled, else without case, spaces and signs."""
    found = [topic for topic in known if name in topic.names]
    if not found:
        plain = strip_name(name)
        found = [topic for topic in known if plain in map(strip_name, topic.names)]
    # Values of options are not in the index: they count only if no other topic has the name.
    found = [topic for topic in found if topic.group] or found
    return sorted(found, key=lambda topic: topic.title != name)


@cache
def strip_name(name: str) -> str:
    """Return a name without marks, case, spaces, hyphens and mathematical signs."""
    text = cells.write_math(name).lower()
    return re.sub(rf"[\s_\-]|[{cells.MARKS}]$", "", text)


def _list_measures() -> Iterator[Topic]:
    """Yield the measures with what their help says, then the sections of reports."""
    group = "Measures and sections"
    for name, measure in load_measures().items():
        text = inspect.getdoc(measure.options) or ""
        # Paragraphs with indented lines are examples and lists, which are left out.
        paragraphs = [each.replace("\n", " ") for each in text.split("\n\n") if "\n " not in each]
        meaning, *more = paragraphs
        yield Topic(group, name, name, meaning, (" ".join(more),) if more else ())
    for section, layout in layouts().items():
        title = layout.title or section
        details = [layout.display.about] if layout.display else []
        yield Topic(group, section, section, title, tuple(details), (title,))


def _list_columns() -> Iterator[Topic]:
    """Yield every column of rows, then of samples; bounds are in a group of their own."""
    for section, layout in layouts().items():
        for name, column in layout.columns.items():
            group = f"Columns of {section}"
            if section == "bounds" and column.formula:
                group = "Bounds"
            yield _describe_column(group, section, name, column)
    for section, layout in layouts().items():
        for name, column in layout.sample_columns.items():
            topic = _describe_column(f"Columns of {section}", section, name, column)
            yield replace(topic, title=f"{topic.title} (per sample)")


def _describe_column(group: str, section: str, name: str, column: Column) -> Topic:
    """Return the topic of a column: how to read it, what it does not say, and its formula."""
    lines = column.reading.splitlines()
    sources = [line for line in lines if line.startswith(SOURCE)]
    reading = [line for line in lines if line not in sources]
    if column.better:
        reading.append(f"{column.better.capitalize()} is better.")
    details = []
    if reading:
        details.append(f"How to read it: {' '.join(reading)}")
    if column.domain and column.format not in cells.UNMEASURED:
        where = DOMAINS.get(column.domain, f"Domain: {column.domain}. ")
        details.append(f"What it does not say: {where}{cells.STATUS[column.status]}")
    if column.formula:
        details.append(f"{FORMULA}{column.formula}")
    details += sources
    full = f"{section}.{name}"
    words = (full, section, column.label)
    return Topic(group, name, full, column.meaning, tuple(details), words)


def _list_attacks() -> Iterator[Topic]:
    """Yield the attacks with their norms, then the presets."""
    group = "Attacks"
    for name, kind in attack_kinds().items():
        meaning = ATTACKS.get(name, f"An attack of the package {kind.package}.")
        norms = f"Norms: {', '.join(kind.norms)}."
        yield Topic(group, name, name, meaning, (norms,))
    for name in sorted(RESERVED):
        yield Topic(group, name, name, ATTACKS[name])


def _list_headlines() -> Iterator[Topic]:
    """Yield the figures of scorecards, each name once."""
    labels = set()
    for section, headline in list_headlines():
        label = headline.label
        if label and label not in labels:
            labels.add(label)
            meaning = headline.meaning or find_column(f"{section}.{headline.column}").meaning
            words = (label.partition(",")[0], headline.name)
            yield Topic("Figures of scorecards", label, label, meaning, words=words)


def _list_words() -> Iterator[Topic]:
    """Yield the words that nothing else explains, those of wings last."""
    sources = [GROUPS, *(wing.topics for wing in load_wings().values())]
    for groups in sources:
        for group, meanings in groups.items():
            for name, meaning in meanings.items():
                yield Topic(group, name, name, meaning)


def list_options(groups: Mapping[str, type[Settings]]) -> Iterator[Topic]:
    """Yield the options of groups, by command, and the words that they accept."""
    for owner, group in groups.items():
        # Help texts list values as `  NAME   what it is`.
        help_text = inspect.getdoc(group) or ""
        values = dict(re.findall(r"^  (\w+) {2,}(\S.*)$", help_text, re.MULTILINE))
        for option in group.options().values():
            flag = option.flags[0]
            title = f"{flag} of {owner}"
            words = (*option.flags, option.name)
            meaning = option.help
            if option.shown:
                meaning += f" Default: {option.shown}."
            yield Topic("Options", flag.removeprefix("--"), title, meaning, words=words)
            for value in option.values():
                meaning = values.get(value, option.help)
                yield Topic("", value, f"{value}, a value of {title}", meaning)


# Words that no column, bound or option explains


ATTACKS: Mapping[str, str] = {
    "fgsm": "One step of size eps along the sign of the gradient (Goodfellow et al. 2015).",
    "pgd": "Projected gradient steps from a random start (Madry et al. 2018).",
    "apgd-ce": "PGD with automatic step sizes on the cross-entropy (Croce and Hein 2020).",
    "apgd-dlr": "APGD on the difference of logits ratio, which ignores the scale of the logits.",
    "apgd-t": "APGD on the difference of logits ratio, towards one other class after the other.",
    "fab-t": "Searches the nearest point of one class after the other (Croce and Hein 2020).",
    "square": "Random squares, without a gradient (Andriushchenko et al. 2020).",
    "words": "Replaces words of a text, at most eps of them.",
    "characters": "Changes characters of a text, at most eps of them.",
    "suffix": "Adds at most eps tokens to a text: greedy coordinate gradient (Zou et al. 2023).",
    "random": "Adds eps random tokens to a text, as often as suffix tries some.",
    "patch": "Puts any values into at most eps patches of an image, where gradients are largest.",
    "autoattack": "The preset standard.",
    "standard": "AutoAttack: apgd-ce, apgd-t, fab-t and square (Croce and Hein 2020).",
    "quick": "apgd-ce and apgd-t with 20 steps and 3 targets: a weaker, faster AutoAttack.",
    "paper": "As Yudin et al. 2025: fgsm and pgd at 2/255 and 4/255, AutoAttack at 2/255.",
    "custom": "Your own list of attacks, for example custom:apgd-ce,square.",
    "clean": "No attack: accuracy on the samples as they are.",
    "worst": "All attacks with this radius together: a sample is robust if no attack broke it.",
}
"""Attacks and presets of --attack."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "How far a figure is proven": cells.STATUS,
    "Norms of attacks": {
        "linf": "The largest change of any entry of the input, such as a pixel.",
        "l2": "The Euclidean length of the change of the whole input.",
        "l1": "The sum of the changes of all entries of the input.",
        "token-l2": "The largest Euclidean length of the change of any token's embedding.",
        "words": "How many words of a text are changed.",
        "characters": "How many characters of a text are changed.",
        "suffix": "How many tokens are added to a text.",
        "patch": "How many patches of an image are changed, to any values.",
    },
    "Statistics of rules": {
        "median": "Half of the values are below it, half above. In a rule: over the samples.",
        "mean": "The mean. In a rule: over the samples; for a yes-or-no column the share of yes.",
        "p95": "The 95th percentile. In a rule: over the samples.",
        "max": "The largest value. In a rule: over the samples.",
        "each": "In a rule: every row of the table is judged separately.",
    },
    "Verdicts of the gate": {
        "unchanged": "Equal weights, and values that agree within the accuracy of the norms.",
        "improved": "Better than the baseline by more than the limit of the rule, beyond chance.",
        "pass": "The change is within the limit. --strict fails it where chance may hide more.",
        "pass (proven)": "The 95% limits of the change are within the limit of the rule.",
        "inconclusive": "Beyond the limit, but chance may explain it: measure more samples. "
        "--strict fails it.",
        "regressed": "Beyond the limit, and proven to be worse: the gate fails (exit code 1).",
        "not proven": "Outcome of a gate: a rule is inconclusive, or --strict is not satisfied.",
        "not comparable": "The two reports were measured in different ways (exit code 5).",
        "error": "The current figures are unfinished, not finite or not converged (exit code 3).",
    },
    "Words of pages": {
        **{label: column.meaning for label, column in cells.HEADINGS.items()},
        "at X": "The figure holds at the measured samples X and says nothing about other inputs.",
        "at the measured samples": "The figure says nothing about other inputs.",
        "for any input with tokens of no larger norm than measured": "For every input of "
        "as many tokens, each of norm at most R: the largest norm of a token of the sample.",
        "for all inputs as short": "For every input of as many tokens of norm at most R.",
        "for any input with tokens of norms at most r larger than measured": "For every "
        "input of as many tokens, each of norm at most R + r.",
        "within the distance r of the measured samples": "For every X' with ||X' - X||_F <= r.",
        "of the weights": "The figure is computed from the weights alone, without samples.",
        "in the ball": "The figure is about inputs within the radius around a sample. A certified "
        "one holds for all of them, an empirical one for those that were tried.",
        "all inputs, every ||x_i|| <= R": "For every input of as many tokens of norm at most R.",
        "scorecard": "The main results of a report on one screen; `--details` prints all.",
        "sensitivity through attention": "Share of the most sensitive direction that passes any "
        "attention; then any MLP, and the head with the largest share.",
        "of the largest": "The value of a head over that of the largest one, to compare two maps.",
        "accuracy": "Share of the samples that are classified correctly.",
        "confidence": "The probability of no false alarm of the gate over all rules together.",
        "best": "The first model of a ranking. Others may not be distinguishable from it.",
        "not distinguishable": "The limits of the difference contain 0, which proves no equality.",
        "behind": "The paired samples show that the model is worse than the best.",
        "not measured": "The model has no value for the metric of the ranking.",
        "no finite limits": "Too few samples for a 95% interval, or norms became 0 or left 0.",
        "pp": "Percentage points: the difference of two shares. From 50% to 40% are -10pp.",
        "exit code": "0 good, 1 regression, 2 usage, 3 error, 4 data, 5 baseline, 6 unproven, "
        "7 time limit.",
        "weights": "How many parameters the model has, and a hash of their values.",
        "quantised": "Which weights have few bits. The results are of the rounded weights.",
        "data": "Source and number of the samples, and a hash of their list.",
        "commit": "The commit of a repository on the Hugging Face Hub.",
        "suite": "A hash of the ids of all samples: equal for equal samples in any order.",
        "run": "Where and how it was computed: device, precision, seed, time.",
        "command": "The command line that made the report.",
        "reason": "Why a report was made the baseline.",
        "partial": "The run was cut short, so some results are missing.",
        "preprocessing": "How samples were scaled and cut before the model.",
        "versions": "The programs that computed the figures.",
        "shard": "A share of a run's samples, measured apart (--shard i/n --parts FOLDER).",
        "LAYER.HEAD": "A head: index of the attention layer and of the head, both counted from 0.",
    },
    "Names in the JSON": {
        "ids": "Ids of the samples: a hash of values and label.",
        "affine": "A kind of head: q, k and v are affine in the input: the closed form applies.",
        "local": "A kind of head: q, k or v are not affine, so bounds use their derivatives at X.",
        "numerical": "A kind of head: its norm is computed numerically, and it has no bounds.",
        "one input": "The norm is with respect to X, which queries, keys and values all read.",
        "queries apart": "The norm is for two inputs: of queries, and of keys and values.",
        "keys and values": "Only keys and values depend on the input; queries are learned.",
        "module input": "The norm is with respect to these arguments of the module, together.",
        "dense": "A method: the whole Jacobian was computed and decomposed (SVD).",
        "lanczos": "A method: Jacobian products, which approach the norm from below.",
        "max_steps": "Largest number of Lanczos steps for one norm.",
        "logical_chunk": "Number of samples that share one random stream of an attack.",
    },
}
"""The words that nothing else explains, by their heading in the index."""
