"""The words of a page that no column of a section, bound or option explains."""

from __future__ import annotations

from collections.abc import Mapping

from lipaudit.tables.columns import Column, count_column, text_column

ATTACKS: Mapping[str, str] = {
    "fgsm": "One step of size eps along the sign of the gradient (Goodfellow et al. 2015).",
    "pgd": "Projected gradient steps from a random start (Madry et al. 2018); the iterate closest "
    "to success counts.",
    "apgd-ce": "PGD with automatic step sizes on the cross-entropy (Croce and Hein 2020).",
    "apgd-dlr": "PGD with automatic step sizes on the difference of logits ratio, which does not "
    "depend on the scale of the logits.",
    "apgd-t": "APGD on the difference of logits ratio, towards one other class after the other.",
    "fab-t": "Searches the nearest point of one class after the other (Croce and Hein 2020).",
    "square": "Changes random squares of the picture and keeps what helps; needs no gradient "
    "(Andriushchenko et al. 2020).",
    "words": "Replaces words of a text, at most eps of them.",
    "characters": "Changes characters of a text, at most eps of them.",
    "autoattack": "The preset standard.",
    "standard": "AutoAttack: apgd-ce, apgd-t, fab-t and square, each on the samples that are not "
    "broken yet (Croce and Hein 2020).",
    "quick": "apgd-ce and apgd-t with 20 steps and 3 targets: a weaker, faster AutoAttack.",
    "paper": "The attacks of Yudin et al. 2025: fgsm and pgd at 2/255 and 4/255, AutoAttack at "
    "2/255.",
    "custom": "Your own list of attacks, for example custom:apgd-ce,square.",
    "clean": "No attack: accuracy on the samples as they are.",
    "worst": "All attacks with this radius together: a sample is robust if no attack broke it.",
}
"""Attacks and presets of --attack."""

NORMS: Mapping[str, str] = {
    "linf": "The largest change of any entry of the input, such as a pixel.",
    "l2": "The Euclidean length of the change of the whole input.",
    "token-l2": "The largest Euclidean length of the change of any token's embedding.",
    "words": "How many words of a text are changed.",
    "characters": "How many characters of a text are changed.",
}
"""How the size of a perturbation is measured."""

CERTIFICATES: Mapping[str, str] = {
    "wrong": "The sample is misclassified without an attack: there is nothing to certify.",
    "broken": "An attack found a misclassified input in the ball.",
    "certified": "Proven: every input of the ball is classified correctly.",
    "undecided": "No attack broke the sample and no proof succeeded; see the column why.",
    "bound": "Why a sample is undecided: the bounds of the ball are too loose, and the model "
    "has no ReLU that branch and bound could split.",
    "signs": "Why a sample is undecided: the bounds are too loose even after branch and "
    "bound fixed the signs of all ReLUs.",
    "nodes": "Why a sample is undecided: branch and bound reached its limit --nodes.",
    "seconds": "Why a sample is undecided: the time limit --seconds ended the proof.",
    "unbounded": "Why a sample is undecided: the bounds overflowed; the ball is too large.",
}
"""Verdicts of `lipaudit certify`, and reasons why a sample is undecided."""

STATISTICS: Mapping[str, str] = {
    "median": "Half of the values are below it, half above. In a rule: over the samples.",
    "mean": "The mean. In a rule: over the samples; for a yes-or-no column the share of yes.",
    "p95": "The 95th percentile. In a rule: over the samples.",
    "max": "The largest value. In a rule: over the samples.",
    "each": "In a rule: every row of the table is judged separately.",
}
"""How a rule of the gate reduces many values to one number."""

VERDICTS: Mapping[str, str] = {
    "unchanged": "The weights are equal, and the values agree within the accuracy of the norms.",
    "improved": "Better than the baseline by more than the limit of the rule, beyond chance.",
    "pass": "Statistically shown to be no worse than the limit allows.",
    "pass (not proven)": "Within the limit, but chance may hide a regression. --strict fails it.",
    "inconclusive": "Chance may explain the change: its 95 % interval contains the limit of the "
    "rule (in a comparison: zero). Measure more samples. With --strict this fails.",
    "regressed": "Worse than the limit allows, beyond chance: the gate fails (exit code 1).",
    "not comparable": "The two reports were measured in different ways (exit code 5).",
    "error": "The current figures are unfinished, not finite or not converged (exit code 3).",
}
"""Verdicts of `lipaudit gate` and `lipaudit compare` on a change."""

HEADINGS: Mapping[str, Column] = {
    column.label: column
    for column in (
        text_column("head", "LAYER.HEAD, a layer or the model. Both are counted from 0."),
        text_column("model", "The checkpoint, as given for MODEL."),
        text_column("fact", "What a report says of its model, data and run."),
        text_column("figure", "A column of a section, with the attack or radius where needed."),
        # samples
        text_column("sample", "A sample by the first characters of its id, a hash of its values."),
        text_column("place", "Where a sample is: file of a folder, line of a table, or index."),
        text_column("broken", "Smallest radius, for each norm, at which an attack broke it."),
        Column("value", "The value for the sample on this page.", format=""),
        Column("all", "Median over all samples, or the share of yes.", format=""),
        Column("from the worst", "Rank of a sample among all; 1 is the worst.", format=""),
        # bounds
        text_column("bound", "An upper bound on a norm, by its name; in a chart its value."),
        text_column("status", "How far a figure is proven. Of a report: complete or partial."),
        text_column("holds", "Where a bound holds: at the samples X, or on a set of inputs."),
        count_column("heads", "Number of heads with a finite value."),
        Column("median", "Median of bound / exact over the heads.", unit="×", domain=""),
        Column("largest", "Largest bound / exact over the heads.", unit="×", domain=""),
        # attention maps
        Column("P", "The attention map: a row per query, a column per key, rows adding up to 1."),
        Column("mean P", "The attention that a key receives: mean over the queries."),
        Column(
            "share of the gradient",
            "||grad_t m||^2 / sum_s ||grad_s m||^2 of token t, for the gradient of the margin "
            "m = f_y - max_(j != y) f_j. A small change of a token with a large share changes "
            "the decision most. It does not explain the decision.",
            format=".1%",
        ),
        Column(
            "share of the steepest direction",
            "||v_t||^2 of token t, for a model without classes. Here v is the unit change of "
            "the embeddings along which the output changes most. v converges later than the norm.",
            format=".1%",
            status="estimate",
        ),
        # comparisons and the gate
        text_column("metric", "What a rule judges: a column and a statistic."),
        text_column("rule", "A check of the gate: METRIC[@SELECTOR][:STATISTIC] OP LIMIT."),
        text_column("row", "The row of a section that a rule judges: a head, an attack."),
        text_column("verdict", "Such as pass or regressed: see `lipaudit explain regressed`."),
        Column("old", "Value of the first report, on the shared samples.", format=""),
        Column("new", "Value of the report compared with the first.", format=""),
        Column("baseline", "Value of the report to compare with.", format=""),
        Column("current", "Value of the judged report, on the shared samples.", format=""),
        Column(
            "change", "New against old: relative (%), in points (pp) or a difference.", format=""
        ),
        Column(
            "paired",
            "The tested change: each sample against itself. The median over samples; of rules "
            "with `each` the geometric mean.",
            format="",
        ),
        text_column("limits", "Interval of the paired change, corrected for all rules."),
        Column("95 % limits", "Interval of the paired change, for each figure alone.", format=""),
        count_column("samples", "Number of shared samples."),
        text_column("outcome", "Of a ranking: best, behind the best or not distinguishable."),
        count_column("lost", "Samples that were right, robust or certified and no longer are."),
        count_column("gained", "Samples that are right, robust or certified and were not."),
        Column(
            "McNemar",
            "p-value of the exact McNemar test: are as many lost as gained?",
            format=".2g",
            domain="",
        ),
        text_column("became", "The sample's result in the first and in the other report."),
        Column(
            "p (Holm)",
            "p-value that the head did not change (Student's t), corrected over all heads.",
            format=".2g",
            domain="",
        ),
        Column(
            "stands",
            "Whether the change is proven with Holm's correction over all heads (5 %).",
            format="",
        ),
        # several models
        count_column("rank", "1 for the best model and all not distinguishable from it."),
        Column(
            "difference",
            "Difference from the best model, sample by sample, with corrected 95 % limits.",
            domain="",
        ),
    )
}
"""Columns of the tables of a page that belong to no section, by their headings."""

WORDS: Mapping[str, str] = {
    "at X": "The figure holds at the measured samples X and says nothing about other inputs.",
    "in the ball": "The figure holds for every input within the radius around a sample.",
    "all inputs, every ||x_i|| <= R": "Holds for every input of as many tokens of norm at most R.",
    "scorecard": "The main results of a report on one screen. `--details` prints all sections.",
    "clean accuracy": "Share of the samples that are classified correctly without any attack. "
    "CI is the 95 % confidence interval for samples like these (Wilson 1927).",
    "robust accuracy": "Share of the samples that stay correct under all attacks of this radius.",
    "certified accuracy": "Share of the samples proven correct for every input of the ball.",
    "certified radius": "Radius around a sample in which its class is proven not to change. "
    "Shown: the median over correct samples with a 95 % interval (sign test).",
    "model sensitivity": "Jacobian norm ||J||: how much a small change of a sample can grow in "
    "the model's output.",
    "steepest attention head": "The head with the largest exact norm ||J|| (median of samples).",
    "fragile attention rows": "Share of attention rows that are neither flat nor one-hot, mean "
    "over the heads: softmax reacts most there. Training with --penalty jasmin lowers it.",
    "tightest bound": "The bound closest to the exact norm: bound / exact at the median head.",
    "certified bound": "The tightest bound that holds on a whole set of inputs.",
    "accuracy": "Share of the samples that are classified correctly.",
    "confidence": "The probability that the gate raises no false alarm over all rules together.",
    "best": "The model with the highest robust accuracy, else certified accuracy, else the "
    "lowest median Jacobian norm. Others may not be distinguishable from it.",
    "not distinguishable": "The limits of the difference contain 0, which proves no equality.",
    "behind": "The paired samples show that the model is worse than the best.",
    "not measured": "The model has no value for the metric of the ranking.",
    "detectable": "The smallest paired change that would have been called a regression.",
    "too few samples": "With so few samples, the 95 % interval of the change is infinite.",
    "pp": "Percentage points: the difference of two shares. From 50 % to 40 % are -10pp.",
    "exit code": "0: fine. 1: regression. 2: usage. 3: internal or evaluation error. 4: model or "
    "data. 5: baseline. 6: not proven (--strict). 7: time limit. 130: interrupted.",
    "weights": "How many parameters the model has, and a hash of their values.",
    "data": "Source and number of the samples, and a hash of their list.",
    "commit": "The commit of a repository on the Hugging Face Hub.",
    "suite": "A hash of the ids of all samples: equal for equal samples in any order.",
    "run": "Where and how it was computed: device, precision, seed, time.",
    "command": "The command line that made the report.",
    "reason": "Why a report was made the baseline.",
    "partial": "The run was cut short, so some results are missing.",
    "preprocessing": "How samples were scaled and cut before the model.",
    "versions": "The programs that computed the figures.",
    "shard": "One part of a run that was measured separately (--shard); lipaudit merge joins the "
    "parts.",
    "LAYER.HEAD": "A head: index of the attention layer and of the head, both counted from 0.",
}
"""Words of facts, notes and the scorecard."""

FIELDS: Mapping[str, str] = {
    "ids": "Ids of the samples: a hash of values and label.",
    "affine": "A kind of head: queries, keys and values are affine functions of the input, "
    "so the closed form applies.",
    "local": "A kind of head: queries, keys or values are not affine in the input. Bounds "
    "use their derivative at the samples.",
    "numerical": "A kind of head: its norm is computed numerically, and it has no bounds.",
    "one input": "The norm is with respect to X, which queries, keys and values all read.",
    "queries apart": "The norm is with respect to the input of the queries and that of keys and "
    "values, varied independently.",
    "keys and values": "Only keys and values depend on the input of the head. "
    "Its queries are learned constants.",
    "module input": "The norm is with respect to all inputs of the module around the layer.",
    "dense": "A method: the whole Jacobian was computed and decomposed (SVD).",
    "lanczos": "A method: iterations with Jacobian products, which approach the norm from below.",
    "max_steps": "Largest number of Lanczos steps for one norm.",
    "logical_chunk": "Number of samples that share one random stream of an attack, for any "
    "batch size.",
}
"""Kinds and methods of norms, and settings in the JSON."""
