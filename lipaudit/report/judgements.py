"""Comparisons and rankings of reports, as pages; `gates` has the pages of the gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from lipaudit.gate.comparison import Comparison, HeadChange, Pair, SampleChange
from lipaudit.gate.ranking import Ranked, Ranking
from lipaudit.gate.rules import find_words
from lipaudit.gate.verdicts import Judgement, Verdict
from lipaudit.measures import find_column
from lipaudit.report.blocks import (
    Block,
    Cells,
    Chapter,
    Document,
    Paragraph,
    list_notes,
    list_steps,
)
from lipaudit.report.cells import pick_columns
from lipaudit.report.changes import (
    MOVED,
    PAIRED_NOTE,
    choose_tone,
    compute_size,
    count_samples,
    describe_flip,
    draw_changes,
    draw_ranking,
    show_flipped,
    write_answer,
)
from lipaudit.report.document import list_names, list_warnings, make_pages, open_several
from lipaudit.report.gates import make_judgement_page
from lipaudit.report.groups import count_part, show_group_changes, show_movement
from lipaudit.report.opening import open_page
from lipaudit.report.rows import (
    FIT,
    TOP,
    list_distinct,
    map_heads,
    read_change,
    read_verdict,
    tabulate_rows,
)
from lipaudit.report.steps import Suggestion, suggest_after_comparison
from lipaudit.tables import Column, Note, Report, model_labels
from lipaudit.tables.columns import group_values
from lipaudit.tables.formats import describe_places, format_count, join_texts
from lipaudit.tables.summary import describe_figure
from lipaudit.tables.trials import FLAGS


def make_page(
    result: Comparison | Ranking | Judgement,
    reports: Sequence[Report],
    files: Sequence[str] = (),
    *,
    short: bool = False,
) -> Document:
    """Return the page of a comparison, a ranking or a judgement of the gate.

    Args:
        result: a comparison, a ranking or a judgement.
        reports: the compared, ranked or judged reports; of a judgement, the baseline's first.
        files: the files of the reports, for commands; empty if unknown.
        short: whether the page has to fit one screen; it then lacks the sections of the reports.
            The page of a judgement is always short.
    """
    if isinstance(result, Comparison):
        return make_comparison_page(result, reports, files, short=short)
    if isinstance(result, Judgement):
        return make_judgement_page(result, reports, files)
    opening = open_several(reports, describe_ranking(result), short=short)
    return make_pages(reports, [opening, show_ranking(result, reports, short=short)], short=short)


# Comparisons


STATUS_WORDS = {
    "regressed": "worse",
    "improved": "better",
    "inconclusive": "not proven",
    "unchanged": "unchanged",
}
"""Words of a comparison for the status of a verdict, the most severe first.

Pictures have those of `changes.WORDS`.
"""
FEW = 3
"""Number of samples and heads on one screen; it has twice as many figures."""
CARRIED = "jacobian.shares."
"""Beginning of the metrics of parts of the model's norm that pass through each head."""
BRIEF_CHANGES = pick_columns(
    "figure", status="verdict", baseline="old", current="new", paired="paired change"
)
"""Columns of changes on one screen; like all columns of verdicts by the fields of `Verdict`."""
CHANGES = BRIEF_CHANGES | pick_columns(
    limits="95% limits",
    samples="samples",
    samples_needed="samples needed",
    lost="lost",
    gained="gained",
    mcnemar="McNemar",
    change="change",
    metric="metric",
)
HEADS = pick_columns(
    "head", paired="paired change", limits="95% limits", p_adjusted="p (Holm)", stands="stands"
)


FIGURES_NOTE = (
    "Figures of samples are medians and 95th percentiles over the samples. Figures of heads are "
    "medians or means over the heads, as on the scorecard. One differs: the largest head norm "
    "takes the steepest head of each sample, and the scorecard's steepest head is one for all "
    "samples."
)
HEADS_NOTE = (
    "A proven change (column stands) has p (Holm), corrected over all heads, of at most 5%."
)


def make_comparison_page(
    comparison: Comparison, reports: Sequence[Report], files: Sequence[str], *, short: bool
) -> Document:
    """Return the page of a comparison: what changed, then the reports side by side.

    Args:
        comparison: the comparison.
        reports: the compared reports.
        files: the files of the reports; empty if unknown.
        short: whether the page has to fit one screen: short tables, and no sections of reports.
    """
    # Each pair compares a new model with the same old model, whose report is the first.
    pairs = comparison.pairs
    several = len(pairs) > 1
    places = dict[str, str]()
    for report in reports:
        places |= describe_places(report)
    chapters = []
    steps = list[Suggestion]()
    for number, pair in enumerate(pairs, 1):
        for chapter in _list_chapters(pair, places, reports, short=short):
            if several:
                chapter = _add_model(chapter, pair.new, number)
            chapters.append(chapter)
        if not short:
            two_files = [files[0], files[number]] if files else []
            steps += suggest_after_comparison(pair, [reports[0], reports[number]], two_files)
    chapters[1:1] = list_steps(steps)  # after the first chapter: what changed
    page = make_pages(reports, [_open_comparison(comparison, reports), *chapters], short=short)
    which = f"{len(pairs)} models" if several else pairs[0].new
    return replace(page, title=f"lipaudit: {which} against {pairs[0].old}")


def _open_comparison(comparison: Comparison, reports: Sequence[Report]) -> Chapter:
    """Return the opening of a comparison's page: the answer, models and data, and warnings.

    Args:
        comparison: the comparison. Each of its pairs compares a new model with the same old model.
        reports: the compared reports.
    """
    pairs = comparison.pairs
    answers = []
    warnings = list_warnings(reports)
    for pair in pairs:
        answers.append(write_answer(pair))
        for text in (*pair.warnings, *_list_excluded(pair)):
            note = Note.warn(code="differs", text=text)
            warnings.append(note.add_lead(pair.new if len(pairs) > 1 else ""))
    judged = chain.from_iterable(pair.verdicts for pair in pairs)
    answers.append(f"95% confidence for each figure alone{count_samples(judged)}.")
    answer = Paragraph(" ".join(answers), tone=choose_tone(pairs))
    # Each set of samples once: most comparisons have a single one.
    data = dict.fromkeys(f"{r.run.data.spec}, {format_count(r.run.data.samples)}" for r in reports)
    models = [("old", pairs[0].old), *(("new", pair.new) for pair in pairs)]
    facts = [*models, ("data", "; ".join(data))]
    return open_page(answer=answer, facts=facts, notes=warnings)


def _add_model(chapter: Chapter, model: str, number: int) -> Chapter:
    """Return a chapter with the model in its title, and a name that no other model's chapter has.

    A page with several comparisons has the same chapters for each further model.

    Args:
        chapter: a chapter of the comparison with this model.
        model: name of the model.
        number: number of the comparison, from 1.
    """
    title = chapter.title
    if model not in title:
        title = f"{model}: {title}"
    return replace(chapter, name=f"{chapter.name}-{number}", title=title)


def _list_excluded(pair: Pair) -> Iterator[str]:
    """Yield each reason why metrics could not be compared, with the names of these metrics."""
    excluded = group_values((v.reason, v.metric) for v in pair.verdicts if v.reason)
    for reason, metrics in excluded.items():
        yield f"not compared, {reason}: {', '.join(metrics)}"


def _list_chapters(
    pair: Pair, places: Mapping[str, str], reports: Sequence[Report], *, short: bool
) -> Iterator[Chapter]:
    """Yield the chapters of the comparison of two reports, without empty ones.

    Args:
        pair: the comparison of one model with the first.
        places: the place of each sample in the data, by id.
        reports: all reports of the page; images and texts of samples are read from these.
        short: for one screen.
    """
    most = FEW if short else TOP  # rows of a table
    # The parts of the model's norm that pass through each head have a chapter of their own.
    carriers = [head for head in pair.heads if head.metric.startswith(CARRIED)]
    heads = [head for head in pair.heads if head not in carriers]
    change = f"What changed from {pair.old} to {pair.new}?"
    for name, title, contents in (
        ("change", change, _show_figures(pair, short=short)),
        ("groups", "Which groups changed?", show_group_changes(pair, most)),
        ("predictions", "How did the predictions move?", show_movement(pair.predictions)),
        ("samples", "Which samples changed?", _show_samples(pair, places, reports, short=short)),
        ("heads", "Which heads changed?", _show_heads(heads, most, short=short)),
        (
            "carriers",
            "Which heads carry the change of the norm?",
            _show_heads(carriers, most, short=short),
        ),
    ):
        if contents:
            yield Chapter(name, title, contents)


# Chapters


def _show_figures(pair: Pair, *, short: bool) -> list[Block]:
    """Return a table of the verdicts on all figures; a full page adds a picture and notes.

    Args:
        pair: the comparison of two models.
        short: for one screen: only the first verdicts, in fewer columns.
    """
    judged = list_distinct(pair.verdicts)
    # Shares of yes-or-no results, such as accuracies, come first: they alone have a McNemar test.
    # Then the most severe verdicts come first, then the largest changes.
    severity = [*STATUS_WORDS]  # the statuses, the most severe first
    judged.sort(key=lambda v: (v.mcnemar is None, severity.index(v.status), -compute_size(v)))
    shown = judged
    columns = CHANGES
    parts: list[Block] = []
    if judged:
        parts.append(Paragraph(PAIRED_NOTE))
    if short:
        shown = judged[: 2 * FEW]
        columns = BRIEF_CHANGES
    else:
        parts += draw_changes((verdict.subject, verdict) for verdict in judged)
    rows = [read_verdict(verdict) | {"status": STATUS_WORDS[verdict.status]} for verdict in shown]
    moved = {i for i, verdict in enumerate(shown) if verdict.status in MOVED}
    title = f"Figures, accuracy first, then proven changes{count_part(shown, judged)}"
    parts += tabulate_rows(columns, rows, title, strong=moved)
    if not short:
        if shown:
            parts.append(Paragraph(FIGURES_NOTE))
        parts += list_notes(Note.info(code="differs", text=text) for text in pair.notes)
    return parts


def rank_heads(changes: Sequence[HeadChange]) -> list[HeadChange]:
    """Return the heads with a known change (its size is not -1), the largest change first."""
    known = [head for head in changes if compute_size(head) >= 0]
    return sorted(known, key=compute_size, reverse=True)


def _show_heads(heads_moved: Sequence[HeadChange], most: int, *, short: bool) -> list[Block]:
    """Return a table of the heads that changed most, and a map of all heads for each metric.

    Args:
        heads_moved: the change of each head in each metric. The first metric ranks the heads.
        most: number of heads in the table.
        short: for one screen: only the table, without the old and new values of each metric.
    """
    # The heads by metric, without the statistic behind the colon: `bounds.exact` of
    # `bounds.exact:each`.
    metrics = group_values((head.metric.rpartition(":")[0], head) for head in heads_moved)
    if not metrics:
        return []
    main_metric, heads = next(iter(metrics.items()))
    ranked = rank_heads(heads)
    shown = ranked[:most]
    if not short and len(ranked) <= FIT:  # a full page has room for all heads
        shown = ranked
    rows = [_list_head_cells(head) for head in shown]
    columns = dict(HEADS)
    maps = []
    if not short:
        for metric, changes in metrics.items():
            by_place = {(change.layer, change.head): change for change in changes}
            # Adds two columns to `columns`, and their cells to `rows`.
            _add_values(metric, by_place, columns=columns, rows=rows)
            maps.append(_map_changes(metric, by_place))
    # The heads whose change in the main metric is proven (`stands`).
    proven = sum(head.stands for head in heads)
    parts: list[Block] = [Paragraph(f"{proven} of {len(heads)} changes are proven. {HEADS_NOTE}")]
    strong = {i for i, head in enumerate(shown) if head.stands}
    title = f"Heads that moved most{count_part(shown, ranked)}, by {find_words(main_metric)}"
    parts += tabulate_rows(columns, rows, title, strong=strong)
    return parts + maps


def _add_values(
    metric: str,
    heads: Mapping[tuple[int, int], HeadChange],
    columns: dict[str, Column],
    rows: Sequence[Cells],
) -> None:
    """Add the old and the new value of a metric to the table of heads that moved most.

    Args:
        metric: the metric.
        heads: the changes of the metric, by layer and head.
        columns: the columns of the table; gets two for the metric.
        rows: the cells of the table, a row for each head; gets the values.
    """
    column = find_column(metric)
    for when in ("old", "new"):
        key = f"{metric}, {when}"
        columns[key] = replace(column, label=f"{find_words(metric)}, {when}")
        for row in rows:
            head = heads.get((row["layer"], row["head"]))
            if head is not None:  # the head was measured in this metric
                row[key] = getattr(head, when)


def _list_head_cells(head: HeadChange) -> Cells:
    """Return the cells of a head in the table of heads that moved most.

    The cell `stands`, whether the change is proven, stays empty if the change was not tested.
    """
    cells = read_verdict(head)
    if head.p_adjusted is not None:
        cells["stands"] = head.stands
    return cells


def _map_changes(metric: str, heads: Mapping[tuple[int, int], HeadChange]) -> Block:
    """Return a map of the changes of a metric: a row for each layer, a column for each head."""
    # "%": relative changes. "pp": changes of shares, shown as percentage points. "": differences.
    unit = next(iter(heads.values())).unit
    format = {"%": "+.1%", "pp": "+.1f", "": "+.3g"}[unit]
    values = {}
    for place, head in heads.items():
        value = read_change(head)
        if value is not None and unit == "pp":
            value *= 100.0
        values[place] = value
    meaning = "New value over old value, sample by sample."
    status = find_column(metric).status
    # The format already writes the sign %.
    change = Column("change", meaning=meaning, unit=unit.strip("%"), format=format, status=status)
    title = f"How {find_words(metric)} changed in every head"
    return map_heads(title, values, change, centre=0.0)


def _show_samples(
    pair: Pair, places: Mapping[str, str], reports: Sequence[Report], *, short: bool
) -> list[Block]:
    """Show the samples whose result changed, those that got worse first.

    Args:
        pair: the comparison of two models.
        places: the place of each sample in the data, by id.
        reports: the reports with images and texts of samples.
        short: for one screen: few samples, without their figures, images and texts.
    """
    # `lost` and `gained`: the results that changed from yes to no, and from no to yes.
    worse = [sample for sample in pair.samples if sample.lost]
    better = [sample for sample in pair.samples if sample.gained and not sample.lost]
    flipped = worse + better
    if not flipped:
        return []
    shown = flipped[: FEW if short else FIT]
    columns = pick_columns("sample", "place", "became")
    rows = list_names([sample.id for sample in shown], places)
    for row, sample in zip(rows, shown, strict=True):
        row["became"] = describe_flip(sample)
    if not short:
        # Adds two columns for each metric to `columns`, and their cells to `rows`.
        _add_figures(shown, columns=columns, rows=rows)
    title = "Samples that changed" + count_part(shown, flipped)
    counts = f"Samples that got worse: {len(worse)}. Samples that only got better: {len(better)}."
    parts: list[Block] = [Paragraph(counts), *tabulate_rows(columns, rows, title)]
    if not short:
        parts += show_flipped(flipped, reports)
    return parts


def _add_figures(
    samples: Sequence[SampleChange], columns: dict[str, Column], rows: Sequence[Cells]
) -> None:
    """Add to a table of samples the old and the new value of metrics.

    These are the metrics that at least half of the samples have, the most common metric first.

    Args:
        samples: the samples.
        columns: the columns of the table; gets two for each metric.
        rows: the cells of the table, a row for each sample; gets the values.
    """
    counts = Counter(chain.from_iterable(sample.figures for sample in samples))
    for metric, count in counts.most_common():
        name, _, trial = metric.partition("@")  # `attack.margin` and `pgd,linf,0.1`
        if 2 * count < len(samples):
            continue
        if name.split(".")[-1] in FLAGS:  # yes-or-no results: the column `became` shows them
            continue
        column = find_column(metric)
        for index, when in enumerate(("old", "new")):
            key = f"{metric}, {when}"
            columns[key] = replace(column, label=join_texts((find_words(name), trial, when)))
            for row, sample in zip(rows, samples, strict=True):
                if metric in sample.figures:
                    row[key] = sample.figures[metric][index]


# Rankings


FIGURES = 4
"""Number of figures of each scorecard on one screen."""


def show_ranking(ranking: Ranking, reports: Sequence[Report], *, short: bool) -> Chapter:
    """Return the chapter of a ranking: a table, the criterion and, on full pages, a picture."""
    # The criterion is the metric to rank by. Without one, the models keep the order as given.
    title = "The models, in order"
    keys = 1  # columns that name a row: the model
    criterion = []
    if ranking.criterion:
        title = "Which model is the most robust?"
        keys = 2  # the rank and the model
        criterion.append(Paragraph(_describe_criterion(ranking)))
    pictures = []
    if not short:
        pictures = draw_ranking(ranking)
    columns, rows = list_models(ranking, reports, FIGURES if short else None)
    tables = tabulate_rows(columns, rows, keys=keys)
    parts = (*tables, *criterion, *pictures, *list_notes(ranking.notes))
    return Chapter("ranking", title, parts)


def _describe_criterion(ranking: Ranking) -> str:
    """Say by which metric models are ranked, what rank 1 means, and what the limits are."""
    # The difference of each model from the best one, which has none itself. There is at least one:
    # a ranking has a criterion only if two models or more could be compared.
    differences = [model.difference for model in ranking.models if model.difference]
    text = (
        f"Ranked by {differences[0].subject}{count_samples(differences)}; rank 1 has the best "
        "model and every one that is not distinguishable from it. Limits of differences: 95%, "
        "paired"
    )
    if ranking.compared > 1:
        text += f", each corrected for {ranking.compared} comparisons"
    return f"{text}."


def list_models(
    ranking: Ranking, reports: Sequence[Report], most: int | None = None
) -> tuple[dict[str, Column], list[Cells]]:
    """Return the columns of a ranking, and a row for every model.

    Args:
        ranking: the ranking, with the main figures of every model.
        reports: the reports, in the order given; their figures get columns in this order.
        most: largest number of figures; None: all.
    """
    figures: dict[str, Column] = {}
    summaries = {model.model: model.summary for model in ranking.models}
    for name in model_labels(reports):
        for figure in summaries[name].rows:
            # With this prefix, a figure called `rank` does not replace the rank of the model.
            figures.setdefault(f"figure {figure.figure}", describe_figure(figure))
    columns = pick_columns("model")
    if ranking.criterion:  # the metric by which the models are ranked
        columns = pick_columns("rank", "model", "outcome", "difference")
    columns |= dict([*figures.items()][:most])
    rows = []
    for model in ranking.models:
        row = {f"figure {figure.figure}": figure.value for figure in model.summary.rows}
        row |= {"rank": model.rank, "model": model.model, "outcome": model.outcome}
        difference = model.difference
        if difference is not None:  # the best model has none
            texts = read_verdict(difference)  # such as paired "+14.3%", limits "+5% to +19%"
            row["difference"] = texts["paired"]
            if texts["limits"]:
                row["difference"] += f" ({texts['limits']})"
        rows.append(row)
    return columns, rows


def describe_ranking(ranking: Ranking) -> str:
    """Say which models are best, behind the best, or not comparable; empty without a ranking.

    For example: "Best by robust accuracy (linf 4/255): A (64.8%). Behind the best: B (51.6%;
    difference -18.2 to -8.1 pp, 256 samples)."
    """
    # The verdict on the difference of each model from the best model, which itself has none.
    differences = [model.difference for model in ranking.models if model.difference]
    texts = group_values((m.outcome, _describe_ranked(m, differences)) for m in ranking.models)
    sentences = []
    for outcome, models in texts.items():
        start = outcome.capitalize()
        if outcome == "best" and differences:
            start += f" by {differences[0].subject}"
        if outcome:  # empty without a ranking
            sentences.append(f"{start}: {', '.join(models)}.")
    return " ".join(sentences)


def _describe_ranked(model: Ranked, differences: Sequence[Verdict]) -> str:
    """Return a model with its figure: "A (64.8%)", or "B (51.6%; difference -18.2 to ...)".

    A model that is not ranked has the reason in place of a figure, if there is one.

    Args:
        model: the model.
        differences: the verdicts on the differences of all other models from the best model. In
            each verdict, the best model is the baseline.
    """
    details = [model.reason]
    if model.difference is not None:
        texts = model.difference.texts
        details = [texts["current"]]
        if texts["limits"]:
            samples = format_count(model.difference.samples)
            details.append(f"difference {texts['limits']}, {samples}")
    elif model.rank:  # a rank without a difference: this is the best model, every baseline
        # There is a difference: models get ranks only if two or more could be compared.
        details = [differences[0].texts["baseline"]]
    if any(details):
        return f"{model.model} ({'; '.join(details)})"
    return model.model
