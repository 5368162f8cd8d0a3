"""Certificates of a model's decision on a ball around a sample, and attacks on the same ball.

A certificate holds for the real-valued function that the stored weights define (see `certify`). A
program that runs the model in floating point adds its own rounding. `Bracket` searches the
smallest ball that an attack breaks and the largest ball that is certified.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, combinations
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from lipaudit.attacks.balls import distance, select_places
from lipaudit.attacks.evaluate import Chunk, Outcome, Texts, evaluate_chunk
from lipaudit.attacks.kinds import Trial
from lipaudit.attacks.oracle import margins as worst_margins
from lipaudit.attacks.oracle import pull
from lipaudit.attacks.rewriting import list_substitutes
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.models.endpoints import find_tokens
from lipaudit.models.net import Net, watch_modules
from lipaudit.models.requirements import agree
from lipaudit.tables import Note
from lipaudit.tables.trials import Radius
from lipaudit.theory import NODES
from lipaudit.wings.certificates.branch import Nodes, decide
from lipaudit.wings.certificates.form import Form, UnboundedError
from lipaudit.wings.certificates.prove import ball, bound_margins, hull, run
from lipaudit.wings.certificates.symbols import Norm

Why = Literal["", "bound", "signs", "nodes", "seconds", "unbounded", "broken", "tokens"]

# Number of forms of the widest tensor held at once during a pass.
TENSORS = 4
# Largest number of input pairs for which auto chooses order 2.
MOST_PAIRS = 10_000
# Number of texts that are embedded at a time.
MOVES = 64
# Largest number of parts by the signs of ReLUs before a box of pixels is bisected.
SIGNS = 256


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
        certified: every input of the ball is proven to get the label.
        why: why the proof failed: "bound" (no ReLU of unknown sign is left), "signs" (the signs of
            all ReLUs are fixed), "nodes" or "seconds" (the limits), "unbounded" (the bounds
            overflowed: the ball is too large), "broken" (an input of another class was found), or
            "tokens" (near words change the number of tokens, or how others are tokenized).
        bound: smallest margin of a part, up to a positive factor; proven if certified.
        nodes: number of parts of the ball that were examined.
        places: share of the places of patches that are proven.
        leaves: the proven parts, if the ball was split.
    """

    certified: bool
    why: Why
    bound: float = -math.inf
    nodes: int = 0
    places: float = math.nan
    leaves: Nodes | None = None


def certificate(
    net: Net,
    sample: Batch,
    label: int,
    eps: float,
    proof: Proof | None = None,
    texts: Texts | None = None,
) -> Certificate:
    """Try to prove that every input in a ball around a sample gets its label.

    Args:
        net: a classifier.
        sample: one sample; for texts the ball is in the embeddings.
        label: the class to prove.
        eps: radius of the ball in the attacked space; the L-inf ball is intersected with the box.
            For the norms patch and words the number of changes.
        proof: the settings of the proof.
        texts: the sample as a text, for the norm words.

    Raises:
        NoRuleError: the model uses an operation that has no rule.
    """
    proof = proof or Proof()
    if proof.seconds <= 0:
        return Certificate(certified=False, why="seconds")
    if proof.norm == "patch":
        return _prove_places(net, sample, label, int(eps), proof)
    if texts is not None:
        return _prove_words(net, sample, label, int(eps), proof, texts)
    free = net.free(sample)
    start = ball(
        net.point(sample),
        eps,
        norm=proof.norm,
        order=proof.order,
        box=net.box,
        moving=None if free is None else free[..., None],
        dtype=net.dtype,
    )
    return _prove_form(net, sample, label, start, proof)


def _prove_form(net: Net, sample: Batch, label: int, start: Form, proof: Proof) -> Certificate:
    """Try to prove that every input of a form gets the label."""
    try:
        gaps = bound_margins(lambda z: net.forward(z, sample), start, label, module=net.module)
        verdict = decide(gaps, nodes=proof.nodes, seconds=proof.seconds, leaves=proof.leaves)
    except UnboundedError:
        return Certificate(certified=False, why="unbounded")
    why: Why = "" if verdict.certified else verdict.limit  # type: ignore[assignment]
    if why == "signs" and not verdict.relus:  # a model without ReLU has no signs to decide
        why = "bound"
    leaves = verdict.leaves
    return Certificate(verdict.certified, why, verdict.bound, verdict.nodes, leaves=leaves)


def _prove_words(
    net: Net, sample: Batch, label: int, k: int, proof: Proof, texts: Texts
) -> Certificate:
    """Try to prove the label for all replacements of k words by near ones, in one pass."""
    found = list_substitutes(texts.reader, texts.drafts[0], k)
    if found is None:
        return Certificate(certified=False, why="tokens")
    x = net.point(sample)
    words = [word for word, _ in found]
    every = sample.rows(torch.zeros(len(found) + 1, dtype=torch.long))
    place = find_tokens(sample)[0]
    for row, (_, ids) in zip(every.x[1:], found, strict=True):
        row[place] = torch.tensor(ids, device=x.device)
    moves = []
    least = math.inf
    for part in every.split(MOVES):
        z = net.point(part)
        logits = net.output(part)
        # The proof sees embeddings only: they must tell all that the model reads of the words.
        same = net.forward(z, sample.rows(torch.zeros(len(part), dtype=torch.long)))
        if not agree(logits, same):
            raise InputError(
                f"{net.architecture} reads token ids beside their embeddings",
                "No certificate covers its words: use `lipaudit attack --attack words`.",
            )
        wanted = torch.full((len(part),), label, device=x.device)
        least = min(least, float(worst_margins(logits, wanted).min()))
        moves.append(z.to(torch.float64) - x)
    if least < 0:
        return Certificate(certified=False, why="broken", bound=least)
    if not least > 0:  # 0, or no number
        return Certificate(certified=False, why="bound", bound=least)
    if not found:
        return Certificate(certified=True, why="", bound=least)
    groups = [*Counter(words).values()]  # the words come in order
    start = hull(x, torch.cat(moves)[1:, None], groups, k, dtype=net.dtype)
    return _prove_form(net, sample, label, start, proof)


def _prove_places(net: Net, sample: Batch, label: int, k: int, proof: Proof) -> Certificate:
    """Try to prove the label for any values in any k patches, one choice of places at a time."""
    assert proof.patch is not None
    x = net.point(sample)
    low, high = net.box or (0.0, 1.0)
    places = x[0, 0].numel() // math.prod(proof.patch)
    tried = []
    for chosen in combinations(range(places), k):
        inside = select_places(torch.tensor([chosen], device=x.device), x, proof.patch)
        ends = torch.where(inside, low, x), torch.where(inside, high, x)
        tried.append(_prove_box(net, sample, label, *ends, proof))
        if tried[-1].why in ("broken", "seconds"):
            break
    failed = [each for each in tried if not each.certified]
    return Certificate(
        not failed,
        failed[-1].why if failed else "",
        min(each.bound for each in tried),
        sum(each.nodes for each in tried),
        (len(tried) - len(failed)) / math.comb(places, k),
    )


def _prove_box(
    net: Net, sample: Batch, label: int, low: Tensor, high: Tensor, proof: Proof
) -> Certificate:
    """Try to prove the label for a box of inputs, which is bisected where its bounds are loose.

    A part is cut in the pixel that moves the smallest margin most: half its width times the
    gradient at the centre. The mean gradient is added, as a wide pixel may be flat at the centre.
    """
    parts = [(low, high)]
    nodes = 0
    least = math.inf
    while parts:
        if nodes >= proof.nodes or proof.seconds <= 0:
            why: Why = "seconds" if proof.seconds <= 0 else "nodes"
            return Certificate(False, why, least, nodes)
        low, high = parts.pop()
        centre = (low + high) / 2
        nodes += 1
        # In double precision: a difference that was rounded down would miss an end.
        middle = centre.to(torch.float64)
        below = middle - low.to(torch.float64)
        above = high.to(torch.float64) - middle
        radius = torch.maximum(below, above)
        start = ball(centre, radius, order=proof.order, moving=radius > 0, dtype=net.dtype)
        limited = replace(proof, nodes=min(proof.nodes, SIGNS))
        part = _prove_form(net, sample, label, start, limited)
        least = min(least, part.bound)
        if part.certified:
            continue
        with torch.enable_grad():
            z = centre.clone().requires_grad_()
            y = torch.tensor([label], device=centre.device)
            margin = worst_margins(net.forward(z, sample), y)
        slope = pull((z, margin), torch.ones_like(margin)).abs()
        if float(margin.detach()) < 0:
            return Certificate(False, "broken", float(margin.detach()), nodes)
        widest = (radius * (slope + slope.mean())).flatten().argmax()
        first = high.clone()
        second = low.clone()
        first.view(-1)[widest] = second.view(-1)[widest] = centre.view(-1)[widest]
        parts += [(low, first), (second, high)]
    return Certificate(True, "", least, nodes)


def choose_order(net: Net, sample: Batch, asked: str = "auto", inputs: int = 0) -> int:
    """Return the order of forms: the requested one, or the default for this number of inputs."""
    if asked != "auto":
        return int(asked)
    inputs = inputs or _count_inputs(net, sample)
    return 2 if inputs * (inputs + 1) // 2 <= MOST_PAIRS else 1


def _count_inputs(net: Net, sample: Batch) -> int:
    """Count the entries of a sample that may change."""
    free = net.free(sample)
    point = net.point(sample)
    if free is None:
        return point.numel()
    return int(free.sum()) * point.shape[-1]


def require_room(net: Net, sample: Batch, order: int, inputs: int = 0) -> None:
    """Refuse a pass that does not fit into the memory of its device.

    A tensor has a row for every symbol born before it, and several tensors exist at once. There
    is one row per input (at order 2 also per pair of inputs), and about one per number that an
    innermost module returns. `inputs` may state how many entries change at once.

    Raises:
        InputError: the message states the memory needed.
    """
    counts: list[int] = []

    def count(_name: str, _args: object, out: object) -> None:
        if isinstance(out, Tensor):
            counts.append(out.numel())

    innermost = (part for part in net.module.named_modules() if not any(part[1].children()))
    with watch_modules(innermost, count), torch.no_grad():
        net.output(sample)
    inputs = inputs or _count_inputs(net, sample)
    rows = inputs
    if order == 2:
        rows += inputs * (inputs + 1) // 2
    # Upper estimate: every number that an innermost module returns may add a symbol of its own.
    born = accumulate([rows, *counts])
    widths = [net.point(sample).numel(), *counts]
    needed = TENSORS * torch.finfo(net.dtype).bits // 8 * max(map(mul, born, widths))
    if net.device.type == "cpu":
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        there = int(torch.get_device_module(net.device).mem_get_info(net.device)[1])
    if needed > there:
        raise InputError(
            f"a certificate of {net.architecture} takes about {needed / 2**30:,.0f} GiB at order "
            f"{order}, and {net.device.type} has {there / 2**30:,.0f}",
            "Use a smaller model or input, or `lipaudit attack`, which works on any model."
            if order == 1
            else "Try --order 1.",
        )


def require_rules(net: Net, sample: Batch) -> None:
    """Refuse a model with an operation that has no rule, at the cost of a few forwards.

    The trial ball has radius 0 in one entry, and rounding errors stay in the slack, so no symbols
    are added.

    Raises:
        NoRuleError: the message names the operation and its module.
        InputError: the output does not depend on the input.
    """
    point = net.point(sample)
    first = torch.zeros(point.shape, dtype=torch.bool, device=point.device)
    first.view(-1)[0] = True
    start = ball(point, 0.0, moving=first, dtype=net.dtype, slack_share=math.inf)
    try:
        output = run(lambda z: net.forward(z, sample), start, module=net.module)
    except UnboundedError:
        return  # slack grows faster than symbols: later operations are checked in the run
    if not isinstance(output, Form):
        raise InputError(
            f"the output of {net.architecture} does not depend on its input",
            "There is nothing to certify: check the model.",
        )


# First radius of the adversarial search, as a share of the input range.
START = 2.0**-8
# First radius of the certificate search, as a share of the adversarial radius.
SHARE = 2.0**-3
# Number of halvings of the way between a sample and an adversarial example.
HALVINGS = 8
# A search stops below this share of the largest possible radius.
LEAST = 2.0**-12


class Bracket:
    """Attacks and proofs on the balls around one sample.

    Args:
        net: a classifier.
        sample: one sample.
        proof: the settings of proofs.
        trials: returns the attacks for a ball.
        seed: seed of the attacks.
        texts: the sample as a text, for the norm words.

    Attributes:
        label: the true class, -1 if unknown.
        predicted: the class that the model predicts.
        clean: the outcome without an attack.
        correct: whether the prediction is right; without a label it counts as right.
        stood: largest radius at which attacks found nothing.
        nearest: distance of the nearest adversarial example found.
        example: the last adversarial example that an attack found. A proof that finds one, of
            patches or words, moves `nearest` alone: nobody reads its example.
        certified: largest certified radius; -1 for none.
        tried: the certificate of each radius.
        seconds: wall time.
        notes: notes of the attacks.
    """

    def __init__(
        self,
        net: Net,
        sample: Batch,
        *,
        proof: Proof,
        trials: Callable[[Sequence[Radius]], Sequence[Trial]],
        seed: int,
        texts: Texts | None = None,
    ) -> None:
        self.net = net
        self.sample = sample
        self.proof = proof
        self.texts = texts
        self.trials = trials
        self.seed = seed
        with torch.no_grad():
            self.predicted = int(net.output(sample).argmax())
        self.label = -1 if sample.y is None else int(sample.y)
        self.stood = 0.0
        self.nearest = math.inf
        self.certified = -1.0
        self.tried: dict[float, Certificate] = {}
        self.seconds: dict[float, float] = {}
        self.notes: list[Note] = []
        self.clean = next(self._run_attacks(()))
        self.example = self.clean.x_adv
        self.correct = bool(self.clean.robust)

    @property
    def wanted(self) -> int:
        """Return the class to prove: the label, or without one the prediction."""
        return self.label if self.label >= 0 else self.predicted

    def decide_balls(self, radii: Sequence[Radius]) -> Iterator[None]:
        """Decide some balls, and yield after the attacks and after each ball.

        Attacks begin with the smallest ball; a success breaks all larger balls. Proofs begin with
        the largest ball; a success holds for all smaller ones.
        """
        ordered = sorted(radii, key=float)
        for radius in ordered:
            if self.correct and self.nearest > float(radius):
                self.attack(radius)
        yield
        for radius in reversed(ordered):
            if self.correct and self.nearest > float(radius) > self.certified:
                self.prove(float(radius))
            yield

    def search(self, tol: float) -> None:
        """Search the smallest adversarial radius, then the largest certified one."""
        if not self.correct:
            return
        x = self.net.point(self.sample)
        linf = self.proof.norm == "linf"
        # The largest radius to search: the width of the box, or the size of the sample.
        if self.net.box is not None:
            low, high = self.net.box
            most = high - low
            if not linf:
                most = most * math.sqrt(x.numel())
        elif linf:
            most = float(x.abs().max())
        else:
            most = float(torch.linalg.vector_norm(x))

        def attack(eps: float) -> None:
            known = self.nearest
            self.attack(Radius(f"{eps:.6g}", Fraction(eps)))
            if self.nearest == known:
                return
            # Move the example towards the sample while it stays broken.
            low = 0.0
            high = 1.0
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                with torch.no_grad():
                    logits = self.net.forward(torch.lerp(x, self.example, middle), self.sample)
                broken = int(logits.argmax()) != self.wanted
                low, high = (low, middle) if broken else (middle, high)
            moved = distance(torch.lerp(x, self.example, high), x, self.proof.norm)
            self.nearest = min(self.nearest, float(moved))

        def bracket_proofs() -> tuple[float, float]:
            refused = (eps for eps, each in self.tried.items() if not each.certified)
            return max(self.certified, 0.0), min([self.nearest, *refused])

        _search(attack, lambda: (self.stood, self.nearest), (START * most, most), tol)
        reach = min(self.nearest, most)
        _search(self.prove, bracket_proofs, (SHARE * reach, reach), tol)

    def attack(self, radius: Radius) -> None:
        """Attack one ball until an attack succeeds."""
        _, *outcomes = self._run_attacks(self.trials([radius]))
        for outcome in outcomes:
            self.notes += outcome.notes
            if not outcome.robust:
                self.nearest = min(self.nearest, float(radius), float(outcome.distance))
                self.example = outcome.x_adv
                return
        self.stood = max(self.stood, float(radius))

    def prove(self, eps: float) -> None:
        """Try to certify one ball."""
        began = time.perf_counter()
        self.tried[eps] = certificate(
            self.net, self.sample, self.wanted, eps, self.proof, self.texts
        )
        self.seconds[eps] = time.perf_counter() - began
        if self.tried[eps].certified:
            self.certified = max(self.certified, eps)
        elif self.tried[eps].why == "broken":
            self.nearest = min(self.nearest, eps)

    def _run_attacks(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Run attacks, first the sample without attack; each sample has its own random stream."""
        y = torch.tensor([self.wanted], device=self.sample.x.device)
        point = self.net.point(self.sample)
        free = self.net.free(self.sample)
        chunk = Chunk(0, point, y, free, self.texts)
        model = self.net.make_classifier(self.sample)
        box = self.net.box
        patch = self.proof.patch
        return evaluate_chunk(model, chunk, trials, box=box, seed=self.seed, patch=patch)


def _search(
    look: Callable[[float], None],
    known: Callable[[], tuple[float, float]],
    reach: tuple[float, float],
    tol: float,
) -> None:
    """Search the radius up to which a property holds: doubling or halving, then bisection.

    Args:
        look: examines a radius.
        known: returns the largest radius at which the property is known to hold, or 0, and the
            smallest radius at which it is known not to hold.
        reach: the first and the largest radius to examine.
        tol: relative width at which the search ends.
    """
    first, most = reach
    low, high = known()
    while low < most and high > max(low * (1 + tol), LEAST * most):
        if low:
            look(min(2 * low, math.sqrt(low * high), most))
        else:
            look(min(first, high / 2))
        low, high = known()
