"""Certificates of a model's decision on a ball around a sample.

A certificate holds for the real-valued function that the stored weights define (see `certify`). A
program that runs the model in floating point adds its own rounding.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from lipaudit.attacks.balls import select_places
from lipaudit.attacks.evaluate import Texts
from lipaudit.attacks.oracle import margins as worst_margins
from lipaudit.attacks.oracle import pull
from lipaudit.attacks.rewriting import list_substitutes
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.models.endpoints import find_tokens
from lipaudit.models.net import Net, watch_modules
from lipaudit.models.requirements import agree
from lipaudit.theory import NODES
from lipaudit.wings.certificates.branch import Nodes, prove_positive
from lipaudit.wings.certificates.form import Form, UnboundedError
from lipaudit.wings.certificates.prove import ball, bound_margins, hull, run
from lipaudit.wings.certificates.symbols import Norm

Why = Literal["", "bound", "signs", "nodes", "seconds", "unbounded", "broken", "tokens"]

# Number of forms of the widest tensor held at once during a pass.
TENSORS_AT_ONCE = 4
# Largest number of input pairs for which auto chooses order 2.
MOST_PAIRS = 10_000
# Number of texts that are embedded at a time.
TEXTS_PER_PASS = 64
# Largest number of parts by the signs of ReLUs before a box of pixels is bisected.
NODES_PER_BOX = 256


@dataclass(frozen=True)
class Proof:
    """The settings of a proof.

    Attributes:
        norm: norm of the ball, or of the radius as a number: patch (any values in so many
            patches) or words (so many words replaced by near ones).
        order: 1 for affine forms, 2 for quadratic ones.
        nodes: largest number of parts of a ball in branch and bound; with patches of each place.
        deadline: time (of `time.monotonic`) after which no new step begins.
        patch: height and width of a patch, for the norm patch.
        leaves: parts of an earlier proof, to be evaluated in place of a search.
    """

    norm: Norm | Literal["patch"] = "linf"
    order: int = 1
    nodes: int = NODES
    deadline: float = math.inf
    patch: tuple[int, int] | None = None
    leaves: Nodes | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds left until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Certificate:
    """The outcome of a proof on one ball.

    Attributes:
        why: empty if every input of the ball is proven to get the label. Else why the proof
            failed: "bound" (no ReLU of unknown sign is left), "signs" (the signs of
            all ReLUs are fixed), "nodes" or "seconds" (the limits), "unbounded" (the bounds
            overflowed: the ball is too large), "broken" (an input of another class was found), or
            "tokens" (near words change the number of tokens, or how others are tokenized).
        bound: smallest margin of a part, up to a positive factor; proven if certified. If the
            limits end a proof for patches, that of the part that was tried last; -inf for none.
        nodes: number of parts of the ball that were examined.
        places: share of the places of patches that are proven.
        leaves: the proven parts, if the ball was split.
        seconds: wall time of the proof.
    """

    why: Why
    bound: float = -math.inf
    nodes: int = 0
    places: float = math.nan
    leaves: Nodes | None = None
    seconds: float = 0.0

    @property
    def certified(self) -> bool:
        """Return whether every input of the ball is proven to get the label."""
        return not self.why


def certify_ball(
    net: Net,
    sample: Batch,
    label: int,
    eps: float,
    proof: Proof,
    texts: Texts | None = None,
) -> Certificate:
    """Try to prove that every input in a ball around a sample gets its label.

    Args:
        net: a classifier.
        sample: one sample; for texts the ball is in the embeddings.
        label: the class to prove.
        eps: radius of the ball in the attacked space; an L-inf ball is intersected with the box of
            valid inputs. For the norms patch and words, the number of patches or words.
        proof: the settings of the proof.
        texts: the sample as a text, for the norm words.

    Raises:
        NoRuleError: the model uses an operation that has no rule.
    """
    if proof.seconds <= 0:
        return Certificate(why="seconds")
    if proof.norm == "patch":
        return _prove_places(net, sample, label, int(eps), proof)
    if texts is not None:
        return _prove_words(net, sample, label, int(eps), proof, texts)
    moving = net.find_free_tokens(sample)
    if moving is not None:
        moving = moving[..., None]  # all entries of the embedding of a token that may change
    # A form (centre + coefficients . symbols) that represents all inputs of the ball.
    start = ball(
        net.point(sample),
        eps,
        norm=proof.norm,
        order=proof.order,
        box=net.box,
        moving=moving,
        dtype=net.dtype,
    )
    return _prove_form(net, sample, label, start, proof)


def _prove_form(net: Net, sample: Batch, label: int, start: Form, proof: Proof) -> Certificate:
    """Try to prove that the model gives the label to every input of a form.

    `start` is a form (centre + coefficients . symbols) that stands for all inputs of a ball.
    `prove_positive` may split the ball by the signs of ReLUs to prove all margins positive. With
    `proof.leaves`, the parts of an earlier proof, it evaluates these in place of a search.
    """
    try:
        margins = bound_margins(lambda z: net.forward(z, sample), start, label, module=net.module)
        decision = prove_positive(
            margins, nodes=proof.nodes, seconds=proof.seconds, leaves=proof.leaves
        )
    except UnboundedError:
        return Certificate(why="unbounded")
    # `limit` is the reason why the search ended: "nodes", "seconds" or "signs" (all ReLUs were
    # split); empty if the margins are proven.
    why: Why = decision.limit  # type: ignore[assignment]
    if why == "signs" and not decision.relus:  # no ReLU to split: the bounds alone fail
        why = "bound"
    return Certificate(why=why, bound=decision.bound, nodes=decision.nodes, leaves=decision.leaves)


def _prove_words(
    net: Net, sample: Batch, label: int, k: int, proof: Proof, texts: Texts
) -> Certificate:
    """Try to prove the label for all texts with at most k words replaced by near words.

    The texts with a single replaced word are run first. If one of them gets another class, the
    sample is broken. The embeddings of these texts then span a set (`hull`) that contains all
    combinations of k replacements, and one pass through the model tries to prove this set.

    Args:
        net: a classifier of texts.
        sample: one text, as a batch.
        label: its class.
        k: number of words that may be replaced at once.
        proof: how the proof is computed.
        texts: the same text, split into words: `drafts` has one entry.
    """
    substitutes = list_substitutes(texts.reader, texts.drafts[0], k)
    if substitutes is None:  # replacements change how the text is tokenized
        return Certificate(why="tokens")
    # `moves` are differences of embeddings, one for each replaced word: changed text - text.
    margin, moves = _run_substitutes(net, sample, label, [ids for _, ids in substitutes])
    if margin < 0:
        return Certificate(why="broken", bound=margin)
    if not margin > 0:  # 0 or NaN
        return Certificate(why="bound", bound=margin)
    if not substitutes:  # no word can be replaced: only the text itself had to be checked
        return Certificate(why="", bound=margin)
    counts = Counter(word for word, _ in substitutes)  # replacements of each word, in order
    start = hull(net.point(sample), moves, [*counts.values()], k, dtype=net.dtype)
    return _prove_form(net, sample, label, start, proof)


def _run_substitutes(
    net: Net, sample: Batch, label: int, substitutes: Sequence[Sequence[int]]
) -> tuple[float, Tensor]:
    """Run a text, and each text with one word replaced.

    Args:
        net: a classifier.
        sample: the text.
        label: its class.
        substitutes: the token ids of each text with one word replaced.

    Returns:
        The smallest margin, logit of the label minus the largest other logit; and the changes of
        the embeddings by each replacement, (replacements, 1, *shape of the sample).
    """
    # The sample, then the texts with one word replaced.
    variants = sample.rows(torch.zeros(len(substitutes) + 1, dtype=torch.long))
    # Which columns of the sample are tokens, not padding.
    token_mask = find_tokens(sample)[0]
    for row, ids in zip(variants.x[1:], substitutes, strict=True):
        row[token_mask] = row.new_tensor(ids)
    x = net.point(sample)
    moves = []  # change of the embeddings by each replacement; 0 for the sample, the first one
    margin = math.inf
    for batch in variants.split(TEXTS_PER_PASS):
        z = net.point(batch)
        logits = net.output(batch)
        # The proof covers changes of the embeddings alone. So the model must get the same logits
        # from these embeddings with the token ids of the original text.
        originals = sample.rows(torch.zeros(len(batch), dtype=torch.long))
        if not agree(logits, net.forward(z, originals)):
            raise InputError(
                f"{net.architecture} reads token ids beside their embeddings",
                "No certificate covers its words: use `lipaudit attack --attack words`.",
            )
        labels = torch.full((len(batch),), label, device=x.device)
        margin = min(margin, float(worst_margins(logits, labels).min()))
        moves.append(z.to(torch.float64) - x)
    return margin, torch.cat(moves)[1:, None]  # without the sample


def _prove_places(net: Net, sample: Batch, label: int, k: int, proof: Proof) -> Certificate:
    """Try to prove the label for any pixel values in any k patches of an image.

    Every choice of k places on the grid of patches is a box of inputs, and each box has a separate
    proof. The result is certified if all boxes are; `places` is the share of proven boxes.
    """
    assert proof.patch is not None
    x = net.point(sample)
    lowest, highest = net.box or (0.0, 1.0)
    places = x[0, 0].numel() // math.prod(proof.patch)
    certificates = []
    for choice in combinations(range(places), k):
        inside = select_places(torch.tensor([choice], device=x.device), x, proof.patch)
        # The box has any values inside the chosen patches, and the image elsewhere.
        low = torch.where(inside, lowest, x)
        high = torch.where(inside, highest, x)
        certificate = _prove_box(net, sample, label, low, high, proof)
        certificates.append(certificate)
        # A counterexample, or the end of the time. After other failures the loop goes on, to count
        # the proven places.
        if certificate.why in ("broken", "seconds"):
            break
    # If the loop ended early, the last failure is the reason.
    failures = [certificate.why for certificate in certificates if certificate.why]
    return Certificate(
        why=failures[-1] if failures else "",
        bound=min(certificate.bound for certificate in certificates),
        nodes=sum(certificate.nodes for certificate in certificates),
        places=(len(certificates) - len(failures)) / math.comb(places, k),
    )


def _prove_box(
    net: Net, sample: Batch, label: int, low: Tensor, high: Tensor, proof: Proof
) -> Certificate:
    """Try to prove the label for a box of inputs, by cutting the box into smaller boxes.

    Every box gets one pass through the model and a few splits of ReLUs. If the proof fails, the
    box is cut in two.
    """
    boxes = [(low, high)]  # still to be proven
    nodes = 0  # boxes that were tried
    unproven = -math.inf  # the lower bound in the box that was cut last
    smallest = math.inf  # of the margins' lower bounds in the proven boxes
    # The settings for one box; its `nodes` limits the splits of ReLUs.
    limited = replace(proof, nodes=min(proof.nodes, NODES_PER_BOX))
    while boxes:
        if proof.seconds <= 0:
            return Certificate(why="seconds", bound=unproven, nodes=nodes)
        if nodes >= proof.nodes:
            return Certificate(why="nodes", bound=unproven, nodes=nodes)
        low, high = boxes.pop()
        nodes += 1
        centre = (low + high) / 2
        # In double precision: a radius that is rounded down would not cover the ends of the box.
        middle = centre.to(torch.float64)
        radius = torch.maximum(middle - low.to(torch.float64), high.to(torch.float64) - middle)
        start = ball(centre, radius, order=proof.order, moving=radius > 0, dtype=net.dtype)
        certificate = _prove_form(net, sample, label, start, limited)
        if certificate.certified:
            smallest = min(smallest, certificate.bound)
            continue
        unproven = certificate.bound
        margin, gradient = _find_gradient(net, sample, label, centre)
        if margin < 0:  # the centre gets another class
            return Certificate(why="broken", bound=margin, nodes=nodes)
        # Cut the pixel with the largest effect on the margin: half the width of the pixel times
        # the gradient. The mean gradient is added, because the gradient of a wide pixel may be 0
        # at the centre.
        pixel = (radius * (gradient + gradient.mean())).argmax()
        boxes += _cut_box(low, high, pixel, centre.view(-1)[pixel])
    # Every box is proven: there is no reason of a failure.
    return Certificate(why="", bound=smallest, nodes=nodes)


def _cut_box(
    low: Tensor, high: Tensor, entry: Tensor, cut: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the two halves of the box from `low` to `high`, as pairs of their own ends.

    `entry` is the flat index of the entry whose range is cut, and `cut` the value between them.
    """
    below = high.clone()
    below.view(-1)[entry] = cut
    yield low, below
    above = low.clone()
    above.view(-1)[entry] = cut
    yield above, high


def _find_gradient(net: Net, sample: Batch, label: int, x: Tensor) -> tuple[float, Tensor]:
    """Return the smallest margin of the label at x, and the size of its gradient, (*shape)."""
    with torch.enable_grad():
        z = x.clone().requires_grad_()
        margin = worst_margins(net.forward(z, sample), torch.tensor([label], device=x.device))
    # `pull` returns J^T v for the Jacobian J of the margin in z: with v = 1 the gradient.
    gradient = pull((z, margin), torch.ones_like(margin))
    return float(margin.detach()), gradient.abs()


def choose_order(order: str, inputs: int) -> int:
    """Return the order of the proof: 1 or 2 as given, or for "auto" 2 if there are few inputs.

    Order 1 uses affine functions of the input. Order 2 adds products of pairs of inputs: it is
    tighter and slower.

    Args:
        order: "1", "2" or "auto".
        inputs: number of entries of the sample that change at once.
    """
    if order != "auto":
        return int(order)
    pairs = inputs * (inputs + 1) // 2
    return 2 if pairs <= MOST_PAIRS else 1


def count_entries(net: Net, sample: Batch) -> int:
    """Count the entries of a sample that may change: pixels, or entries of token embeddings."""
    free_tokens = net.find_free_tokens(sample)  # a mask; None: everything may change
    point = net.point(sample)
    if free_tokens is None:
        return point.numel()
    return int(free_tokens.sum()) * point.shape[-1]


def require_room(net: Net, sample: Batch, order: int, inputs: int) -> None:
    """Refuse a proof whose pass through the model does not fit into the memory of its device.

    Args:
        net: a classifier.
        sample: one sample.
        order: order of the proof.
        inputs: number of entries of the sample that change at once.

    Raises:
        InputError: the message states the memory needed.
    """
    # Bytes of the coefficients of a few tensors.
    needed = TENSORS_AT_ONCE * torch.finfo(net.dtype).bits // 8
    needed *= _count_coefficients(net, sample, order, inputs)
    if net.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        memory = int(torch.get_device_module(net.device).mem_get_info(net.device)[1])
    if needed <= memory:
        return
    advice = "Try --order 1."
    if order == 1:
        advice = "Use a smaller model or input, or `lipaudit attack`, which works on any model."
    raise InputError(
        f"a certificate of {net.architecture} takes about {needed / 2**30:,.0f} GiB at order "
        f"{order}, and {net.device.type} has {memory / 2**30:,.0f}",
        advice,
    )


def _count_coefficients(net: Net, sample: Batch, order: int, inputs: int) -> int:
    """Return the largest number of coefficients that a tensor of the model has in a proof.

    Each entry of a tensor is a linear function of unknowns: of all inputs (at order 2 also of
    pairs of inputs), and of an approximation error for each entry that this or an earlier module
    returned. So a tensor has a coefficient for each entry and each unknown.

    Args:
        net: a classifier.
        sample: one sample.
        order: order of the proof.
        inputs: number of entries of the sample that change at once.
    """
    sizes: list[int] = []  # number of entries that each innermost module returns

    def record_size(_name: str, _args: object, out: object) -> None:
        if isinstance(out, Tensor):
            sizes.append(out.numel())

    # Pairs of a name and a module without submodules.
    innermost = (pair for pair in net.module.named_modules() if not any(pair[1].children()))
    with watch_modules(innermost, record_size), torch.no_grad():
        net.output(sample)
    unknowns = inputs
    if order == 2:
        unknowns += inputs * (inputs + 1) // 2
    largest = unknowns * net.point(sample).numel()
    for size in sizes:
        unknowns += size
        largest = max(largest, unknowns * size)
    return largest


def require_rules(net: Net, sample: Batch) -> None:
    """Refuse a model with an operation that has no rule, at the cost of a few forwards.

    The model runs on a trial ball: a single entry of the input changes, by 0. This is the cheapest
    pass, because there is a single unknown. An infinite `slack_share` keeps it so: rounding errors
    do not become further unknowns.

    Raises:
        NoRuleError: the message names the operation and its module.
        InputError: the output does not depend on the input.
    """
    point = net.point(sample)
    first = torch.zeros_like(point, dtype=torch.bool)
    first.view(-1)[0] = True
    start = ball(point, eps=0.0, moving=first, dtype=net.dtype, slack_share=math.inf)
    try:
        output = run(lambda z: net.forward(z, sample), start, module=net.module)
    except UnboundedError:
        # Without these unknowns bounds are loose and may overflow. Operations behind this one are
        # checked in the proofs.
        return
    if not isinstance(output, Form):
        raise InputError(
            f"the output of {net.architecture} does not depend on its input",
            "There is nothing to certify: check the model.",
        )
