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
    "lean": "AutoAttack that stops early on a sample if its progress is too slow to succeed: a "
    "fraction of the passes, at best as strong.",
    "quick": "apgd-ce and apgd-t with 20 steps and 3 targets: a weaker, faster AutoAttack.",
    "paper": "The attacks of Yudin et al. 2025: fgsm and pgd at 2/255 and 4/255, AutoAttack at "
    "2/255.",
    "custom": "Your own ensemble of attacks: custom:apgd-ce,square.",
    "clean": "No attack: accuracy on the samples as they are.",
    "worst": "All attacks of a ball together: a sample is robust if no attack broke it.",
}
"""Attacks, presets, and words in place of an attack."""

NORMS: Mapping[str, str] = {
    "linf": "The largest change of any entry of the input, such as a pixel.",
    "l2": "The Euclidean length of the change of the whole input.",
    "token-l2": "The largest Euclidean length of the change of any token's embedding.",
    "words": "How many words of a text are changed.",
    "characters": "How many characters of a text are changed.",
}
"""In what the radius of an attack is measured."""

CERTIFICATES: Mapping[str, str] = {
    "wrong": "The sample is misclassified without an attack: there is nothing to certify.",
    "broken": "An attack found a misclassified input in the ball.",
    "certified": "Proven: every input of the ball is classified correctly.",
    "undecided": "No attack broke the sample and no proof succeeded; see the column why.",
    "bound": "Why a sample is undecided: the bounds of the whole ball are too loose, and there "
    "is no ReLU whose sign would tighten them.",
    "signs": "Why a sample is undecided: the bounds are too loose even with the signs of all "
    "ReLUs fixed.",
    "nodes": "Why a sample is undecided: branch and bound reached --nodes.",
    "seconds": "Why a sample is undecided: --seconds were over.",
    "unbounded": "Why a sample is undecided: the bounds overflowed; the ball is too large.",
}
"""Verdicts of `lipaudit certify`, and why a sample is undecided."""

STATISTICS: Mapping[str, str] = {
    "median": "Half of the values are below it, half above; of a rule, over the samples.",
    "mean": "The mean; of a rule, over the samples: of a yes or no the share of yes.",
    "p95": "The 95th percentile; of a rule, over the samples.",
    "max": "The largest value; of a rule, of any sample.",
    "each": "Of a rule: every row is judged separately.",
}
"""How a rule of the gate makes one number of many."""

VERDICTS: Mapping[str, str] = {
    "unchanged": "Same weights, and the same values to the accuracy of the norms.",
    "improved": "Better than the rule asks for by more than its limit, beyond chance.",
    "pass": "Shown to be no worse than the limit allows.",
    "pass (not proven)": "No worse than the limit on these samples, but chance may hide that it "
    "is; --strict fails it.",
    "inconclusive": "Chance may explain the change: the limits of the rule, or in a comparison "
    "zero, are within its 95 % interval. Measure more samples; --strict fails it.",
    "regressed": "Worse than the limit allows, beyond chance: the gate fails (exit code 1).",
    "not comparable": "The two reports were measured in different ways (exit code 5).",
    "error": "The current figures are unfinished, not finite or not converged (exit code 3).",
}
"""What `lipaudit gate` and `lipaudit compare` say of a change."""

WORDS: Mapping[str, str] = {
    "at X": "The figure holds at the measured samples X, and says nothing of other inputs.",
    "in the ball": "The figure is about every input within the radius of a sample.",
    "all inputs, every ||x_i|| <= R": "The figure holds for every sequence of as many tokens, "
    "none of which is longer than R.",
    "heads": "Number of heads with a finite value.",
    "largest": "The largest value of the row.",
    "smallest": "The smallest value of the row.",
    "bound": "An upper bound: its name in a table of bounds, its value in a picture.",
    "status": "How far a figure is proven: certified, exact, bound, estimate or empirical; of a "
    "report, whether the run was complete.",
    "holds": "Where a bound holds: at the samples X, or on a set of inputs.",
    "statistic": "The column of heads whose distribution is shown.",
    "sample": "A sample by the first characters of its id, a hash of its values.",
    "broken": "The smallest ball of each norm in which an attack turned the sample into an error.",
    "figure": "A column of a section, and the attack or ball that it is about.",
    "value": "The figure of the one sample that is shown.",
    "all": "Over all samples: the median of a figure, or the share of yes.",
    "from the worst": "The rank of a sample among all; 1 is the worst.",
    "share of the gradient": "Token t's part of the gradient of the margin m = f_y - "
    "max_(j != y) f_j in the embeddings: ||grad_t m||^2 / sum_s ||grad_s m||^2 over all tokens s; "
    "exact at X. Small changes of tokens with large shares move the decision most. It does not "
    "say that the class is given because of them.",
    "share of the steepest direction": "For a model without classes: ||v_t||^2 of token t, where "
    "v is the unit change of the embeddings along which the output changes most (the leading "
    "right singular vector of the Jacobian). It is an estimate: v converges later than the norm.",
    "place": "Where a sample is found in the data: a file of a folder, a line of a table, an "
    "index of an array, a character of a text.",
    "rows": "Rows of the attention map, one per query; how many of them fall in a bin.",
    "key": "Position of a key: the token that is attended to.",
    "query": "Position of a query: the token that attends.",
    "P": "The attention map: a row per query, a column per key, each row adding up to 1.",
    "mean P": "The attention that a key receives: the mean of its column of P over the queries.",
    "column": "Of the patches of a picture, counted from the left.",
    "scorecard": "The first figures of a report, on one screen; `--details` prints the sections.",
    "clean accuracy": "Share of the samples that are classified correctly without any attack. "
    "CI is the 95 % confidence interval for samples like these (Wilson 1927).",
    "robust accuracy": "Share of the samples that no attack of the ball turned into an error. A "
    "stronger attack may lower it.",
    "certified accuracy": "Share of the samples that are proven to be classified correctly in "
    "the whole ball.",
    "certified radius": "How far around a sample its class is proven not to change: the median "
    "of the correctly classified samples, with a 95 % interval (sign test).",
    "model sensitivity": "Jacobian norm ||J||: how much a small change of a sample can grow in "
    "the model's output.",
    "steepest attention head": "The head with the largest exact norm ||J||, median over the "
    "samples. A head is named LAYER.HEAD, both counted from 0.",
    "steepest head": "See steepest attention head.",
    "fragile attention rows": "Share of attention rows that are neither flat nor one-hot (the "
    "intermediate regime), mean over the heads. Training with --penalty jasmin lowers it.",
    "fragile rows": "See fragile attention rows.",
    "fragile": "See fragile attention rows.",
    "tightest bound": "The upper bound that is closest to the exact norm of a head: bound / exact "
    "at the median head.",
    "certified bound": "The tightest bound that holds on a whole set of inputs.",
    "accuracy": "Share of the samples that are classified correctly.",
    "rule": "A line of the gate's contract: METRIC[@SELECTOR][:STATISTIC] OP LIMIT.",
    "confidence": "The chance that no rule is flagged if all rules are in truth kept.",
    "metric": "What a rule judges: a column of a section, and how its values become one number.",
    "row": "The row of a section that a rule judges: a head, an attack.",
    "verdict": "What the gate says of a rule; see `lipaudit explain regressed` and so on.",
    "baseline": "The report that others are compared with; its value on the shared samples.",
    "current": "The value of the report that is judged, on the shared samples.",
    "old": "The value of the first report, on the shared samples.",
    "new": "The value of the report that is compared with the first, on the shared samples.",
    "change": "New against old, of the two figures: a share (%), points (pp) or a difference.",
    "paired": "The change that is tested, each sample against itself. `median`: the median of "
    "the samples' changes. `each`: their geometric mean. A column of rows in a comparison: the "
    "mean over samples of the change of the median over rows.",
    "limits": "The ends of the interval of the paired change, at the confidence that all rules "
    "share.",
    "95 % limits": "The ends of the 95 % interval of the paired change, figure by figure.",
    "rank": "1 for the best model and those not distinguishable from it, else the place by the "
    "figure that models are ranked by.",
    "outcome": "How a model compares with the best: best, not distinguishable, behind.",
    "median ||J||": "The median over samples of the norm of the model's Jacobian; in brackets its "
    "95 % limits, exact for any distribution (order statistics).",
    "p95 ||J||": "Its 95th percentile over samples.",
    "best": "The model with the highest robust accuracy, else certified accuracy, else the "
    "lowest median Jacobian norm. Others may not be distinguishable from it.",
    "not distinguishable": "0 is within the limits of the difference from the best model. That "
    "does not prove that they are equal.",
    "behind": "The paired samples show that the model is worse than the best.",
    "not measured": "The model has no figure of the metric that the others are ranked by.",
    "difference": "From the best model, sample by sample: points of an accuracy, or the median "
    "ratio of norms; in brackets 95 % limits, corrected for the number of models.",
    "detectable": "The smallest paired change that would have been called a regression.",
    "McNemar": "p-value of an exact test that as many samples were lost as gained.",
    "asked": "What is asked of every sample: whether it is correct, robust or certified.",
    "became": "What a sample was in the first report, and what it is in the other.",
    "too few samples": "With so few samples the 95 % limits of a change would be infinite.",
    "pp": "Percentage points: the difference of two shares. From 50 % to 40 % are -10pp.",
    "lost": "Samples that were correct, robust or certified, and are not any more.",
    "gained": "Samples that are correct, robust or certified now, and were not.",
    "stands": "Whether the change of a head is proven with Holm's correction over all heads: the "
    "chance of naming any unchanged head is 5 %.",
    "p (Holm)": "Two-sided p-value of no change beyond the accuracy of norms (Student's t over "
    "the samples), with Holm's correction over all heads of a column.",
    "median head": "The median over the heads, sample by sample.",
    "steepest head of a sample": "The largest norm of a head at each sample, the median over the "
    "samples: at least that of the steepest head of a scorecard, which is one head.",
    "softmax norm": "||M|| of an attention row, mean over rows and median over the heads.",
    "exit code": "0 fine, 1 regression, 2 usage, 3 internal or evaluation error, 4 model or data, "
    "5 baseline, 6 not proven (--strict), 7 time limit, 130 interrupted.",
    "Spearman correlation": "How alike two figures rank the samples, from -1 to 1, with its 95 % "
    "interval.",
    "model": "The checkpoint, by its MODEL argument; side by side, the report of the row.",
    "weights": "How many parameters the model has, and a hash of their values.",
    "data": "Where the samples come from, how many they are, and a hash of their list.",
    "model commit": "The commit of the model's repository on the Hugging Face Hub.",
    "data commit": "The commit of the data's repository on the Hugging Face Hub.",
    "suite": "A hash of the ids of all samples: equal for equal samples in any order.",
    "run": "Where and how it was computed: device, precision, seed, time.",
    "command": "The command line that made the report.",
    "reason": "Why a report was made the baseline.",
    "fact": "What a report says of its model, data and run.",
    "partial": "The run was cut short: some figures are missing.",
    "shard": "One part of a run that was measured separately (--shard); lipaudit merge joins the "
    "parts.",
    "LAYER.HEAD": "A head: the index of its attention layer and its own, counted from 0.",
}
"""Words of tables, facts and the scorecard."""

FIELDS: Mapping[str, str] = {
    "ids": "The samples of the other columns, by a hash of their values and label.",
    "affine": "A kind of head: queries, keys and values are affine in the input, which closed "
    "forms need.",
    "local": "A kind of head: queries, keys or values are no affine function of the input; "
    "bounds use their derivative at the samples.",
    "numerical": "A kind of head: its norm is computed numerically, and it has no bounds.",
    "one input": "The norm is with respect to X, which queries, keys and values all read.",
    "queries apart": "The norm is with respect to the input of the queries and that of keys and "
    "values, varied independently.",
    "keys and values": "The norm is with respect to their input; the queries are constant.",
    "module input": "The norm is with respect to all inputs of the module around the layer.",
    "dense": "A method: the whole Jacobian was computed, and its norm by a decomposition.",
    "lanczos": "A method that approaches the norm from below by products with the Jacobian.",
    "max_steps": "The most Lanczos steps for a norm.",
    "logical_chunk": "So many samples share the random numbers of an attack, whatever the batch.",
}
"""Kinds and methods of norms, and settings in the JSON."""
