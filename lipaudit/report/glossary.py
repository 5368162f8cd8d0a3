"""What the words of a page mean that no column, bound or option explains."""

from __future__ import annotations

from collections.abc import Mapping

ATTACKS: Mapping[str, str] = {
    "fgsm": "One step of size eps along the sign of the gradient (Goodfellow et al. 2015).",
    "pgd": "Projected gradient steps from a random start (Madry et al. 2018); the iterate closest "
    "to success counts.",
    "apgd-ce": "PGD that chooses its own step sizes, on the cross-entropy (Croce and Hein 2020).",
    "apgd-dlr": "PGD that chooses its own step sizes, on the difference of logits ratio, which "
    "does not depend on their scale.",
    "apgd-t": "APGD on the difference of logits ratio, towards one other class after the other.",
    "fab-t": "Looks for the nearest point of one class after the other (Croce and Hein 2020).",
    "square": "Changes squares of the picture at random and keeps what helps; sees no gradient "
    "(Andriushchenko et al. 2020).",
    "words": "Replaces words of a text, within a number of changes.",
    "characters": "Changes characters of a text, within a number of changes.",
    "autoattack": "The preset standard.",
    "standard": "AutoAttack: apgd-ce, apgd-t, fab-t and square, each on the samples that still "
    "stand (Croce and Hein 2020).",
    "lean": "AutoAttack that gives a sample up, within an attack, where its progress promises "
    "that the rest of the steps will not break it: a fraction of the passes, at best as strong.",
    "quick": "apgd-ce and apgd-t with 20 steps and 3 targets: a weaker, faster AutoAttack.",
    "paper": "The attacks of Yudin et al. 2025: fgsm and pgd at 2/255 and 4/255, AutoAttack at "
    "2/255.",
    "custom": "An ensemble of attacks of one's own: custom:apgd-ce,square.",
    "clean": "No attack: accuracy on the samples as they are.",
    "worst": "All attacks of a ball together: a sample is robust if no attack broke it.",
}
"""Attacks, presets, and what stands where the name of an attack may stand."""

NORMS: Mapping[str, str] = {
    "linf": "The largest change of any one entry of the input, of any pixel say.",
    "l2": "The Euclidean length of the change of the whole input.",
    "token-l2": "The largest Euclidean length of the change of any one token's embedding.",
    "words": "How many words of a text are changed.",
    "characters": "How many characters of a text are changed.",
}
"""In what the radius of an attack is measured."""

CERTIFICATES: Mapping[str, str] = {
    "wrong": "The sample is misclassified as it is: there is nothing to certify.",
    "broken": "An attack found an input of the ball that is classified otherwise.",
    "certified": "Proven: every input of the ball is classified rightly.",
    "undecided": "No attack broke it and no proof succeeded; the column why says what ended that.",
    "bound": "Why a sample is undecided: the bounds of the whole ball are too loose, and there "
    "is no ReLU whose sign would tighten them.",
    "signs": "Why a sample is undecided: the signs of all ReLUs are decided, and what is left is "
    "too loose.",
    "nodes": "Why a sample is undecided: branch and bound reached --nodes.",
    "seconds": "Why a sample is undecided: --seconds were over.",
    "unbounded": "Why a sample is undecided: the bounds overflowed; the ball is too large.",
}
"""Verdicts of `lipaudit certify`, and what leaves a sample undecided."""

STATISTICS: Mapping[str, str] = {
    "median": "Half of the values lie below it, half above; of a rule, over the samples.",
    "mean": "The mean; of a rule, over the samples: of a yes or no the share of yes.",
    "p95": "The 95th percentile; of a rule, over the samples.",
    "max": "The largest value; of a rule, of any sample.",
    "each": "Of a rule: every row is judged by itself.",
}
"""How a rule of the gate makes one number of many."""

VERDICTS: Mapping[str, str] = {
    "unchanged": "Same weights, and the same values to the accuracy of the norms.",
    "improved": "Better than the rule asks for by more than its limit, beyond chance.",
    "pass": "Shown to be no worse than the limit allows.",
    "pass (not proven)": "No worse than the limit on these samples, but chance may hide that it "
    "is; --strict fails it.",
    "inconclusive": "Worse than the limit on these samples, but chance may explain it; more "
    "samples would settle it, and --strict fails it. In a comparison: chance may explain the "
    "change, its 95 % limits leave open whether there is any.",
    "regressed": "Worse than the limit allows, beyond chance: the gate fails (exit code 1).",
    "not comparable": "The two reports were measured in different ways (exit code 5).",
    "error": "The current figures are unfinished, not finite or not converged (exit code 3).",
}
"""What `lipaudit gate` and `lipaudit compare` say of a change."""

WORDS: Mapping[str, str] = {
    "at X": "The figure holds at the samples X that were measured, and says nothing of others.",
    "in the ball": "The figure is of every input within the radius of a sample.",
    "all inputs, every ||x_i|| <= R": "The figure holds for every sequence of so many tokens "
    "none of which is longer than R.",
    "heads": "How many heads a line is about: those with a finite value of it.",
    "largest": "The largest of the values that a line is about.",
    "smallest": "The smallest of the values that a line is about.",
    "bound": "An upper bound: by its name in a table of bounds, its value in a picture.",
    "status": "How far a figure is proven: certified, exact, bound, estimate or empirical; of a "
    "report, whether the run was complete.",
    "holds": "Where a bound holds: at the samples X, or on a set of inputs.",
    "statistic": "The column of heads whose distribution a line shows.",
    "standing": "How far a figure is proven, and where.",
    "sample": "A sample by the first characters of its id, a hash of its values.",
    "broken": "The smallest ball of each norm in which an attack turned the sample into an error.",
    "figure": "What is known of a sample: a column of a section, and the attack or ball it is of.",
    "value": "The figure of the one sample that is shown.",
    "all": "Of all samples: the median of a figure, or the share of yes.",
    "from the worst": "The place of a sample among all in a figure of which less, or more, is "
    "better; 1 is the worst.",
    "share of the gradient": "Of the gradient of the margin m = f_y - max_(j != y) f_j in the "
    "embeddings, the part that falls on a token t: ||grad_t m||^2 / sum_s ||grad_s m||^2, over "
    "all tokens s of the text; exact at X. Small changes of tokens with large shares move the "
    "decision most; it does not say that the class is given because of them.",
    "share of the steepest direction": "Where a model gives no classes: ||v_t||^2 of token t, v "
    "being the unit vector of changes of the embeddings along which the output changes most (the "
    "leading right singular vector of the Jacobian). It converges later than the norm, and where "
    "the second singular value is close to the first others are about as steep: an estimate.",
    "place": "Where a sample is found in the data: a file of a folder, a line of a table, an "
    "index of an array, a character of a text.",
    "rows": "Rows of the attention map, one per query; how many of them fall in a bin.",
    "key": "Position of a key: the token that is attended to.",
    "query": "Position of a query: the token that attends.",
    "P": "The attention map: a row per query, a column per key, each row adding up to 1.",
    "mean P": "The attention that a key receives: the mean of its column of P over the queries.",
    "column": "Of the patches of a picture, counted from the left.",
    "of": "What a line is about: a head, a layer or the model.",
    "regime": "How an attention row spreads: uniform, intermediate (fragile) or categorical.",
    "scorecard": "The first figures of a report, in one screen; `--details` prints the sections "
    "that they are drawn from.",
    "clean accuracy": "Share of the samples that are classified rightly without any attack.",
    "under attack": "Share of the samples that no attack of a ball turned into an error.",
    "Jacobian norm": "How much the model can magnify a small change of a sample: ||J||.",
    "steepest head": "The head with the largest exact norm, median over the samples; a head is "
    "named LAYER.HEAD, both counted from 0.",
    "fragile rows": "Share of attention rows in the intermediate regime, mean over the heads; "
    "training with the penalty jasmin lowers it.",
    "bound / exact": "How many times a bound lies above the exact norm of a head, median over "
    "the heads: the tightest at the samples, and the tightest that is certified.",
    "accuracy": "Share of the samples that are classified rightly.",
    "95 % Wilson": "Limits between which the share lies with 95 % confidence, for samples drawn "
    "like these (Wilson 1927).",
    "95 % bracket": "Limits between which the robust accuracy lies with 95 % confidence, for "
    "samples drawn like these: Wilson's lower one of certified, his upper one of robust.",
    "bracket": "Between which the robust accuracy lies: what is proven is below it, what attacks "
    "left above.",
    "certified radius": "How far around a sample nothing is classified otherwise, proven; the "
    "scorecard has the median of the samples that are right, with its 95 % limits, which are two "
    "of the values (sign test).",
    "share of samples": "How many of the samples have a verdict.",
    "slope 1/2": "How sqrt n grows, to compare slopes with.",
    "amplification": "How much a small change of a head's input is magnified: ||J||.",
    "rule": "A line of the gate's contract: METRIC[@SELECTOR][:STATISTIC] OP LIMIT.",
    "confidence": "How surely no rule that is kept in truth is flagged, all rules together.",
    "paired change": "The change that is tested, sample by sample: see paired. In a picture with "
    "its limits, over a band of what the rule allows.",
    "metric": "What a rule judges: a column of a section, and how its values become one number.",
    "row": "The row of a section that a rule judges: a head, an attack.",
    "verdict": "What the gate says of a rule; `lipaudit explain regressed` and so on.",
    "baseline": "The report that others are compared with; its value on the shared samples.",
    "current": "The value of the report that is judged, on the shared samples.",
    "old": "The value of the first report, on the shared samples.",
    "new": "The value of the report that is compared with the first, on the shared samples.",
    "change": "New against old, of the two figures: a share (%), points (pp) or a difference.",
    "paired": "The change that is tested, each sample against itself: of `median` the median of "
    "the samples' changes, of `each` their geometric mean, else that of the figures; of a column "
    "of rows in a comparison, the mean over samples of the change of the median over rows.",
    "limits": "Between them the paired change lies, at the confidence that all rules share.",
    "95 % limits": "Between them the paired change lies with 95 % confidence, figure by figure.",
    "rank": "Of several models: 1 for the best and for those not distinguishable from it, else "
    "the place by the figure that they are ranked by.",
    "outcome": "How a model stands against the best of several: best, not distinguishable, "
    "behind.",
    "median ||J||": "The median over samples of the norm of the model's Jacobian; in brackets its "
    "95 % limits, exact for any distribution (order statistics).",
    "p95 ||J||": "Its 95th percentile over samples.",
    "best": "The model that most speaks for: by accuracy under attack, else certified, else by "
    "the median Jacobian norm. Others may not be distinguishable from it.",
    "not distinguishable": "The paired samples do not tell the model from the best: 0 lies within "
    "the limits of their difference. It is no proof that they are equal.",
    "behind": "The paired samples show that the model is worse than the best.",
    "not measured": "The model has no figure of what the others are ranked by.",
    "difference": "From the best model, sample by sample: points of an accuracy, or the median "
    "over samples of the ratio of norms; in brackets 95 % limits, corrected for the number of "
    "models that are compared with the best.",
    "fragile": "The share of attention rows in the fragile regime: see intermediate.",
    "detectable": "The smallest paired change that would have been called a regression.",
    "McNemar": "An exact test of no change of a share, by the samples that changed sides: the "
    "chance of so lopsided a split if as many came as left.",
    "asked": "What is asked of every sample: whether it is right, robust or certified.",
    "became": "What a sample was in the first report, and what it is in the other.",
    "too few samples": "So few that a change has no limits: with 95 % confidence they would "
    "reach to infinity.",
    "pp": "Percentage points: the difference of two shares. From 50 % to 40 % are -10pp.",
    "lost": "Samples that left the good side: were right, robust or certified, and are not.",
    "gained": "Samples that came to the good side: are right, robust or certified now.",
    "as before": "Samples that changed sides in no outcome.",
    "stands": "Whether the change of a head is proven with Holm's correction over all heads of a "
    "column: the chance of naming any head that has not changed is 5 %.",
    "up": "Heads whose figure is proven to have grown.",
    "down": "Heads whose figure is proven to have shrunk.",
    "p (Holm)": "Two-sided p-value of no change beyond the accuracy of norms (Student's t over "
    "the samples), with Holm's correction over all heads of a column.",
    "median head": "The median over the heads, sample by sample.",
    "steepest head of a sample": "The largest norm of a head at each sample, the median over the "
    "samples: no less than that of the steepest head of a scorecard, which is one head.",
    "softmax norm": "||M|| of an attention row, mean over rows and median over the heads.",
    "exit code": "0 fine, 1 regression, 2 usage, 3 internal or evaluation error, 4 model or data, "
    "5 baseline, 6 not proven (--strict), 7 time limit, 130 interrupted.",
    "Spearman correlation": "How alike two figures rank the samples, from -1 to 1; an interval "
    "follows it.",
    "model": "The checkpoint, by its MODEL argument; side by side, the report a row comes from.",
    "weights": "How many parameters the model has, and a hash of their values.",
    "data": "Where the samples come from, how many they are, and a hash of the list of them.",
    "model commit": "Which commit of its repository on the Hugging Face Hub the model is of.",
    "data commit": "Which commit of their repository on the Hugging Face Hub the data are of.",
    "suite": "A hash of the ids of all samples: equal for equal samples in any order.",
    "run": "Where and how it was computed: device, precision, seed, time.",
    "command": "The command line that made the report.",
    "reason": "Why a report was made the baseline.",
    "fact": "What a report says of its model, data and run.",
    "partial": "The run was cut short: what is missing was not measured.",
    "measured": "Which measures a training is watched by.",
    "steps": "From where to where a training was measured, and how often.",
    "cost": "What measuring took, and its share of the time of the training.",
    "step": "How many steps of the training were done, or the number in a checkpoint's name.",
    "epoch": "How many times the training has seen its data, where that is known.",
    "of the training": "A figure that the training gave (its loss, say), not measured here.",
    "||J|| of a head": "The exact norm of a head, median over the samples.",
    "shard": "One of the parts of a run that were measured apart (--shard); lipaudit merge makes "
    "one report of all.",
    "LAYER.HEAD": "A head: the index of its attention layer and its own, counted from 0.",
}
"""Words of tables and headings."""

NOTES: Mapping[str, str] = {
    "adapter": "An adapter was merged into the model that it was trained on.",
    "attack-replaced": "An attack needs more classes than the model has; another one ran.",
    "attack-skipped": "An attack needs more classes than the model has, and did not run.",
    "ball-below-resolution": "Rounding is as large as the radius: attacks lose part of the ball.",
    "by-position": "Norms were measured at every position of a text; its own is the largest.",
    "changed-texts": "What attacks on texts keep to, and what they do not: meaning and label.",
    "checkpoint": "The weights were found under a key of a training checkpoint.",
    "clean-accuracy-at-chance": "Without an attack the model is no better than guessing: labels "
    "or preprocessing are probably wrong.",
    "contradiction": "An attack broke a sample in a ball in which it is certified: certificates "
    "and attacks cannot both be right, so one of the two has a fault.",
    "converted": "timm converted the weights from another layout or size.",
    "cut-short": "--time-limit ended a measure: figures are of the samples that were measured.",
    "default-normalisation": "Mean and deviation of the pixels are those of the architecture's "
    "own weights: give --mean and --std if others were used.",
    "conditions": "Something differs between two reports that does not forbid comparing them.",
    "device-map": "Weights are spread over devices, the CPU and the disk (--device-map): how many "
    "numbers lie where.",
    "empty-shard": "A measure has fewer batches than there are shards, and none in this one.",
    "encoder-moves": "Only the embeddings of the encoder are moved; those of the decoder stay.",
    "example": "A text that an attack broke, before and after.",
    "features": "Weights of the file that the output does not need were not read.",
    "gradients-not-finite": "Some gradients are not finite: attacks by gradient are weaker there.",
    "fewer-lengths": "The model or the samples do not reach some of the lengths asked for.",
    "fewer-samples": "The data have fewer samples than were asked for.",
    "fewer-targets": "A targeted attack aims at all other classes, which are few.",
    "forward-error": "Rounding of the forward pass may have moved a norm: try --dtype float64.",
    "half-precision": "Weights in half precision were converted before anything was measured.",
    "hub-cache": "The Hugging Face Hub did not answer, or was not asked: what was fetched before "
    "was read, which may be older.",
    "hub-commit": "Which commit of a repository of the Hugging Face Hub was read.",
    "indicative": "The first-order radius is a hint at a point, never a certificate.",
    "inputs-apart": "Queries read another input than keys and values, and both are varied "
    "independently; --input module takes the norm in what the module takes.",
    "interpolated": "Position embeddings of a model of one image size serve other sizes, between "
    "those it was trained with.",
    "reused": "A resumed run took over the finished samples of a measure.",
    "kept": "An interrupted run left finished parts: --resume goes on with them.",
    "not-kept": "Finished parts cannot be kept, so that --resume would find nothing.",
    "first-output": "The model returns several tensors: the first is measured.",
    "in-parts": "Heads or chunks of one attention that the model's code takes one by one: each is "
    "a layer here.",
    "input-elsewhere": "X of a layer is the input of another module than the attention's, or maps "
    "and norms come between X and the maps of q, k and v.",
    "labels-by-order": "The classes of the data were matched to the model's by their order: the "
    "warning lists the whole map. Where it is wrong, rename the classes to the model's.",
    "labels-unused": "The labels of the data are not used: the model has no such classes.",
    "no-label-column": "No column of a table is called label or the like: --label-column.",
    "latin-1": "A text file was not UTF-8 and was read as Latin-1.",
    "one-stream": "A plain text file is read as one text, cut into windows.",
    "pairs-unseparated": "The tokenizer joins the two texts of a pair with nothing between.",
    "left-out": "Something was not measured, with the reason.",
    "long-maps": "The norm of very long attention maps is given as a limit, never too small.",
    "loose-ball": "A radius is so large that the constants certified there say little.",
    "loss-of-predicted": "A sample without a label has the loss of the class it is taken for.",
    "lower-estimates": "Norms may be too low; `within` is the proven relative error.",
    "masked-classes": "Classes whose logit is minus infinity: they are never predicted.",
    "max-tokens": "The model takes fewer tokens than were asked for.",
    "never-fails": "A figure that the gate shows and never fails.",
    "new-classifier": "The classifier is new and random: train it first.",
    "newer-transformers": "A newer transformers wrote fields of config.json that this one skips.",
    "no-attention": "Blocks of a hybrid model that have no softmax attention, and so no heads.",
    "no-map": "Of shards of an audit none kept the attention map of the steepest head.",
    "no-block": "No block was found whose norm could be taken by itself.",
    "no-bound": "Some bounds cannot be given for some heads, with the reason.",
    "no-closed-form": "The exact norm of some heads is taken numerically, with the reason.",
    "no-decision": "The model has class scores and takes no one class: multi-label, or numbers.",
    "no-derivative": "The gradient of the model is not the derivative of what it computes.",
    "one-logit": "The model has one logit: its sign decides between two classes.",
    "no-labels": "The samples have no labels, and what needs them was left out.",
    "attention-unread": "Modules with attention that is not read: its heads are left out.",
    "read-as": "Which reading of the arrays the model runs on.",
    "repeated-samples": "Some samples are equal: they count once in intervals and in the gate.",
    "no-words": "Texts in which there is no word that could be changed.",
    "whole-texts": "An attack may change so many words or characters as most of the texts have.",
    "within-rounding": "A bound lies below its norm by less than rounding explains.",
    "no-worst-case": "For some heads no worst-case tokens are known, with the reason.",
    "not-compared": "A figure of two reports cannot be compared, with the reason.",
    "not-converged": "Some norms did not meet the stop rule: they are lower estimates.",
    "not-finite": "Some values are not finite.",
    "not-measured": "A measurement of a training failed at a step, with the reason.",
    "note": "A remark of the gate on what it compared.",
    "own-predictions": "Samples without a label: what is certified is that the prediction stays.",
    "gives-up": "Where not even four times the progress of its last steps would break a sample by "
    "the end, lean gives it up, unless an attack came close to it or Square beats gradients.",
    "own-queries": "The paper does not give the settings of AutoAttack; ours are stated.",
    "own-step-size": "The paper gives no step size of PGD; ours is stated.",
    "paired-by-place": "Models see the same inputs in forms of their own, which have other ids: "
    "inputs are paired by their place in the data.",
    "preset-changed": "A preset of attacks was changed by options: it is no longer itself.",
    "probabilities": "The outputs look like probabilities: attack the logits.",
    "radius-incomplete": "For some samples the first-order radius is only a lower limit of it.",
    "random-data": "The samples are noise: the figures say nothing about real inputs.",
    "random-weights": "Nothing was loaded: the figures say nothing about a trained model.",
    "randomised": "Two passes gave different logits: attacks assume a deterministic model.",
    "raw-pixels": "Pixels go in as they are, for want of a preprocessor's configuration.",
    "real-arithmetic": "Of which function certificates are: of the weights in exact arithmetic, "
    "not of a program that rounds.",
    "resolved": "What a bare name was taken for.",
    "routed": "Experts, or keys, are chosen by the largest scores: the Jacobian is that of the "
    "choices made at a sample.",
    "routed-tie": "Two scores of a choice are equal at a sample, where there is no derivative.",
    "searched": "The worst case is the largest that searches found: a lower estimate.",
    "searches-apart": "Independent searches for a worst case do not agree: no exponent is given.",
    "skipped-bad": "Samples that cannot be read were left out, as --skip-bad says.",
    "spoils": "A warning of the report that is judged: its figures may mean little.",
    "square-beats-gradients": "Square, which sees no gradient, broke what gradient attacks did "
    "not: gradients may be masked.",
    "scores": "A language model scores continuations, choices or labels by their log-likelihood.",
    "stored-weights": "Weights are kept in the precision they are stored in, and lifted to that "
    "of the run where a layer reads them.",
    "structure-changed": "A layer is not, on these samples, what it was when it was surveyed.",
    "unknown-tokens": "More than a third of the tokens are unknown to the tokenizer: check that "
    "it is the model's, and that the texts are in its language and case.",
    "text-cut": "Some texts were longer than --max-tokens and were cut.",
    "time-limit": "Some proofs were cut short by --seconds: another machine may get further.",
    "too-short": "Some texts have no token at the position that was asked for.",
    "what-is-measured": "What the norms of layers and of the model in `scaling` are of.",
    "zero-gradients": "Some samples have a gradient of exactly 0: gradient attacks cannot move "
    "them.",
}
"""Codes of notes, which stand in brackets behind them."""
HEADINGS: Mapping[str, str] = {
    "What stands out": "Sentences drawn from the numbers, each with the rows that it comes from.",
    "How to read the figures": "What the standings mean, how the samples were preprocessed, and "
    "the versions of packages.",
    "Samples": "The ten worst samples: broken in most balls, then by their norm.",
    "All rows": "Every row and column of a section, as the JSON has them.",
    "Most amplifying heads": "The heads with the largest exact norms, and every bound as a "
    "multiple of it; all heads where they are few.",
    "All heads": "The exact norm of every head, and every bound as a multiple of it.",
    "Tightness over all heads": "How many times each bound lies above the exact norm: the median "
    "of the heads, and the largest of them.",
    "Upper bounds over the exact norm": "A point for every head and bound: no bound may lie below "
    "the line y = x.",
    "Exact ||J|| of every head": "A cell for every layer and head: which amplify most.",
    "Most intermediate heads": "The heads with the largest share of rows in the fragile regime.",
    "Strongest sinks": "Heads in which one key takes most of the attention, and its position.",
    "Share of rows in the intermediate (fragile) regime": "A cell for every layer and head.",
    "Largest and second largest entry of a row": "Where attention rows lie: uniform at the lower "
    "left, one-hot at the lower right, two equal peaks on top.",
    "Query of head": "How one query of one head attends to all keys, the mean over the samples.",
    "Attention map of head": "Which keys each query of one head attends to, on the first sample.",
    "g1 over the exact ||M||": "How many rows are bounded how tightly by g1; 1 is exact.",
    "Quantiles over samples": "How the norms of the samples are distributed.",
    "Most sensitive samples": "The samples with the largest Jacobian norms.",
    "Norms by position": "The Jacobian norms of the output at each position of a text, over the "
    "texts that have it.",
    "||J|| per sample": "How many samples have a value in each bin.",
    "Accuracy under attack": "The share of samples that withstood, by attack, norm and radius.",
    "Robust accuracy": "What is certified lies below it, what attacks left above.",
    "What is certified": "A bar for each ball, cut by the verdicts of its samples.",
    "Certified over adversarial radius": "A point for each sample: on the line y = x nothing is "
    "left open between what is proven and what attacks found.",
    "The worst samples": "The samples that are broken in most balls, then by their norm.",
    "Norm found as a multiple of exact": "Of every ball: how much larger a norm an ascent met "
    "than the one at the sample, and how loose the constants are that nothing there exceeds.",
    "On data": "Norms at the samples, cut to several lengths.",
    "At worst-case tokens": "The largest norms that any tokens of a length have, searched for.",
    "Worst-case tokens over the radius": "How the largest norm grows with the length of a token.",
    "Exponent of n": "By which power of the length norms and bounds grow.",
    "Changes and what is allowed": "Of a gate: each change that was tested, with its limits over "
    "a band of what the rule allows.",
    "Changes": "Changes that a gate tested, with their limits over a band of what is allowed.",
    "Values": "Current values with absolute limits, over a band of what is allowed.",
    "Verdicts": "Of a gate: what became of every rule.",
}
"""Headings of sections, tables and pictures, as far as they are always alike."""

FIELDS: Mapping[str, str] = {
    "ids": "The samples of the columns beside it, by a hash of their values and label.",
    "affine": "A kind of head: queries, keys and values are affine in the input, which closed "
    "forms need.",
    "local": "A kind of head: queries, keys or values are no affine function of the input, and "
    "bounds take their derivative at the samples.",
    "numerical": "A kind of head: its norm is taken numerically, and it has no bounds.",
    "one input": "In what a norm is taken: X, which queries, keys and values all read.",
    "queries apart": "In what a norm is taken: the input of the queries and that of keys and "
    "values, varied independently.",
    "keys and values": "In what a norm is taken: their input, the queries being constant.",
    "module input": "In what a norm is taken: all that the module around the layer takes.",
    "dense": "A method: the whole Jacobian was computed, and its norm by a decomposition.",
    "lanczos": "A method that approaches the norm from below by products with the Jacobian.",
    "max_steps": "The most Lanczos steps that a norm may take.",
    "logical_chunk": "So many samples share the random numbers of an attack, whatever the batch.",
    "positions": "The Jacobian norm at every position of every text; NaN behind its end.",
    "g1_ratio_hist": "How many rows are bounded how tightly by g1: counts of the histogram.",
    "g1_ratio_edges": "The ends of the bins of that histogram.",
    "p1p2_hist": "How many rows have which largest and second largest entry: counts.",
    "p1p2_edges": "The ends of the bins of those counts.",
    "map": "An attention map; of long sequences the means of square blocks.",
    "row": "One row of an attention map, the mean over the samples.",
    "row_norms": "||M|| and g1 of that row.",
    "map_tokens": "How many queries and keys an attention map has before they are joined.",
    "size": "Channels, height and width of the images that the model takes.",
    "interpolation": "How images are brought to the model's size.",
    "crop_pct": "The share of a resized image that is kept.",
    "crop_mode": "Where the kept part of a resized image lies.",
}
"""Settings, arrays, methods and kinds in the JSON, and what is said of preprocessing."""
