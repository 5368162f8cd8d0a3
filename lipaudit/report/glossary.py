"""The words of a page that no column, bound or option explains."""

from __future__ import annotations

from collections.abc import Mapping

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

WORDS: Mapping[str, str] = {
    "at X": "The figure holds at the measured samples X and says nothing about other inputs.",
    "in the ball": "The figure holds for every input within the radius around a sample.",
    "all inputs, every ||x_i|| <= R": "Holds for every input of as many tokens of norm at most R.",
    "heads": "Number of heads with a finite value.",
    "largest": "The largest value of the row.",
    "smallest": "The smallest value of the row.",
    "bound": "An upper bound on a norm. In a table it is the bound's name, in a chart its value.",
    "status": "How far a figure is proven: certified, exact, bound, estimate or empirical. "
    "For a report: complete or partial.",
    "holds": "Where a bound holds: at the samples X, or on a set of inputs.",
    "statistic": "The column of heads whose distribution is shown.",
    "sample": "A sample by the first characters of its id, a hash of its values.",
    "broken": "The smallest radius, for each norm, at which an attack broke the sample.",
    "figure": "A column of a section, with the attack or radius where needed.",
    "value": "The value for the sample on this page.",
    "all": "The median over all samples, or the share of yes.",
    "from the worst": "The rank of a sample among all; 1 is the worst.",
    "share of the gradient": "Token t's part of the gradient of the margin m = f_y - max_(j != y) "
    "f_j in the embeddings. It is ||grad_t m||^2 / sum_s ||grad_s m||^2 over all tokens s, exact "
    "at X. A small change of a token with a large share changes the decision most. It does not "
    "explain why the model chose the class.",
    "share of the steepest direction": "For a model without classes: ||v_t||^2 of token t. Here v "
    "is the unit change of the embeddings along which the output changes most (the leading "
    "right singular vector of the Jacobian). It is an estimate: v converges later than the norm.",
    "place": "Place of a sample: file in a folder, line of a table, index of an array or text.",
    "rows": "Number of attention rows (one per query) in each bin.",
    "key": "Position of a key: the token that is attended to.",
    "query": "Position of a query: the token that attends.",
    "P": "The attention map: a row per query, a column per key, each row adding up to 1.",
    "mean P": "The attention that a key receives: the mean of its column of P over the queries.",
    "column": "Column of the image patch, counted from the left.",
    "scorecard": "The main results of a report on one screen. `--details` prints all sections.",
    "clean accuracy": "Share of the samples that are classified correctly without any attack. "
    "CI is the 95 % confidence interval for samples like these (Wilson 1927).",
    "robust accuracy": "Share of the samples that stay correct under all attacks with this "
    "radius. A stronger attack may lower it.",
    "certified accuracy": "Share of the samples that are proven correct for every input "
    "within the radius.",
    "certified radius": "Radius around a sample in which its class is proven not to change. "
    "Shown: the median over correct samples with a 95 % interval (sign test).",
    "model sensitivity": "Jacobian norm ||J||: how much a small change of a sample can grow in "
    "the model's output.",
    "steepest attention head": "The head with the largest exact norm ||J||, median over the "
    "samples. A head is named LAYER.HEAD, both counted from 0.",
    "steepest head": "See steepest attention head.",
    "fragile attention rows": "Share of attention rows that are neither flat nor one-hot, "
    "where softmax reacts most to a change. Mean over the heads; "
    "training with --penalty jasmin lowers it.",
    "fragile rows": "See fragile attention rows.",
    "fragile": "See fragile attention rows.",
    "tightest bound": "The upper bound that is closest to the exact norm of a head: bound / exact "
    "at the median head.",
    "certified bound": "The tightest bound that holds on a whole set of inputs.",
    "accuracy": "Share of the samples that are classified correctly.",
    "rule": "One check of the gate: METRIC[@SELECTOR][:STATISTIC] OP LIMIT, for example "
    "jacobian.norm:p95 <= +10%.",
    "confidence": "The probability that the gate raises no false alarm over all rules together.",
    "metric": "The number that a rule judges: a column of a section and a statistic, such as "
    "jacobian.norm:p95.",
    "row": "The row of a section that a rule judges: a head, an attack.",
    "verdict": "The result for one rule: pass, regressed, inconclusive... See `lipaudit "
    "explain regressed`.",
    "baseline": "The report to compare with; in a table, its value on the shared samples.",
    "current": "The value of the report that is judged, on the shared samples.",
    "old": "The value of the first report, on the shared samples.",
    "new": "The value of the report that is compared with the first, on the shared samples.",
    "change": "New value against old value: relative (%), in percentage points (pp) or as a "
    "difference.",
    "paired": "The tested change: each sample is compared with itself. `median` is the "
    "median change, `each` the geometric mean. For head tables: the mean over "
    "samples of the change of the median head.",
    "limits": "The confidence interval of the paired change, corrected for the number of rules.",
    "95 % limits": "The 95 % confidence interval of the paired change, for each figure alone.",
    "rank": "1 for the best model and all models not distinguishable from it. The other "
    "models follow in the order of the metric.",
    "outcome": "How a model compares with the best: best, not distinguishable, behind.",
    "median ||J||": "The median over samples of the norm of the model's Jacobian; in brackets its "
    "95 % limits, exact for any distribution (order statistics).",
    "p95 ||J||": "Its 95th percentile over samples.",
    "best": "The model with the highest robust accuracy, else certified accuracy, else the "
    "lowest median Jacobian norm. Others may not be distinguishable from it.",
    "not distinguishable": "The interval of the difference from the best model contains 0. "
    "That does not prove that the models are equal.",
    "behind": "The paired samples show that the model is worse than the best.",
    "not measured": "The model has no value for the metric of the ranking.",
    "difference": "Difference from the best model, sample by sample: points of an accuracy, or "
    "the median ratio of norms. In brackets: 95 % limits, corrected for the number of models.",
    "detectable": "The smallest paired change that would have been called a regression.",
    "McNemar": "p-value of the exact McNemar test: are samples lost and gained equally often?",
    "asked": "A yes-or-no result of each sample: correct, robust or certified.",
    "became": "The sample's result in the first and in the second report.",
    "too few samples": "With so few samples, the 95 % interval of the change is infinite.",
    "pp": "Percentage points: the difference of two shares. From 50 % to 40 % are -10pp.",
    "lost": "Samples that were correct, robust or certified before and no longer are.",
    "gained": "Samples that are correct, robust or certified now and were not before.",
    "stands": "Whether the change of a head is proven with Holm's correction over all heads: the "
    "chance of naming any unchanged head is 5 %.",
    "p (Holm)": "p-value that the head did not change (two-sided Student's t over the "
    "samples), with Holm's correction over all heads.",
    "median head": "The median over the heads, sample by sample.",
    "steepest head of a sample": "The largest head norm at each sample; median over the samples. "
    "It is at least the norm of the scorecard's steepest head, which is a single head.",
    "softmax norm": "||M|| of an attention row, mean over rows and median over the heads.",
    "exit code": "0: fine. 1: regression. 2: usage. 3: internal or evaluation error. 4: model or "
    "data. 5: baseline. 6: not proven (--strict). 7: time limit. 130: interrupted.",
    "Spearman correlation": "Rank correlation of two figures over the samples, from -1 to 1, "
    "with its 95 % interval.",
    "model": "The checkpoint, as given for MODEL.",
    "weights": "How many parameters the model has, and a hash of their values.",
    "data": "Source and number of the samples, and a hash of their list.",
    "model commit": "The commit of the model's repository on the Hugging Face Hub.",
    "data commit": "The commit of the data's repository on the Hugging Face Hub.",
    "suite": "A hash of the ids of all samples: equal for equal samples in any order.",
    "run": "Where and how it was computed: device, precision, seed, time.",
    "command": "The command line that made the report.",
    "reason": "Why a report was made the baseline.",
    "fact": "What a report says of its model, data and run.",
    "partial": "The run was cut short, so some results are missing.",
    "shard": "One part of a run that was measured separately (--shard); lipaudit merge joins the "
    "parts.",
    "LAYER.HEAD": "A head as LAYER.HEAD: index of the attention layer and of the head, both "
    "counted from 0.",
}
"""Words of tables, facts and the scorecard."""

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
