"""Attacks and proofs on the balls around one sample.

`Bracket` searches the smallest ball that an attack breaks and the largest ball that is certified.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch.linalg import vector_norm

from lipaudit.attacks.balls import distance
from lipaudit.attacks.evaluate import Chunk, Outcome, Texts, evaluate_chunk
from lipaudit.attacks.kinds import Trial
from lipaudit.data.batch import Batch
from lipaudit.models.net import Net
from lipaudit.tables import Note
from lipaudit.tables.trials import Radius
from lipaudit.wings.certificates.certificate import Certificate, Proof, certify_ball

# First radius of the adversarial search, as a share of the input range.
ATTACK_SHARE = 2.0**-8
# First radius of the certificate search, as a share of the adversarial radius.
PROOF_SHARE = 2.0**-3
# Number of halvings of the way between a sample and an adversarial example.
HALVINGS = 8
# A search stops below this share of the largest possible radius.
SMALLEST_SHARE = 2.0**-12


@dataclass(eq=False)
class Bracket:
    """Attacks and proofs on the balls around one sample.

    Attributes:
        net: a classifier.
        sample: one sample.
        proof: the settings of proofs.
        trials: returns the attacks for a ball.
        seed: seed of the attacks.
        texts: the sample as a text, for the norm words.
        label: the true class, -1 if unknown.
        predicted: the class that the model predicts.
        clean: the outcome without an attack.
        correct: whether the prediction is right; without a label it counts as right.
        unbroken_radius: largest radius at which attacks found nothing.
        adversarial_radius: distance of the nearest adversarial example found.
        example: the last adversarial example that an attack found. A proof that finds one, of
            patches or words, changes `adversarial_radius` alone: nobody reads its example.
        certified_radius: largest certified radius; -1 for none.
        certificates: the certificate of each radius that was tried.
        notes: notes of the attacks.
    """

    net: Net
    sample: Batch
    proof: Proof
    trials: Callable[[Sequence[Radius]], Sequence[Trial]]
    seed: int
    texts: Texts | None = None
    unbroken_radius: float = 0.0
    adversarial_radius: float = math.inf
    certified_radius: float = -1.0
    certificates: dict[float, Certificate] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Run the model on the sample without an attack."""
        with torch.no_grad():
            self.predicted = int(self.net.output(self.sample).argmax())
        self.label = -1 if self.sample.y is None else int(self.sample.y)
        self.clean = next(self._run_attacks(()))  # the first outcome is without an attack
        self.example = self.clean.x_adv
        self.correct = bool(self.clean.robust)  # without an attack: whether the class is right

    @property
    def label_to_prove(self) -> int:
        """Return the class to prove: the label, or without one the prediction."""
        return self.label if self.label >= 0 else self.predicted

    def decide_balls(self, radii: Sequence[Radius]) -> Iterator[None]:
        """Attack and prove some balls; yield None after the attacks and after each proof.

        The results are in the attributes; at each `yield` the caller can report progress. Attacks
        begin with the smallest ball, because a broken ball breaks all larger balls. Proofs begin
        with the largest ball, because a proof holds for all smaller balls.
        """
        ordered = sorted(radii, key=float)
        for radius in ordered:
            if self.correct and self.adversarial_radius > float(radius):
                self.attack(radius)
        yield
        for radius in reversed(ordered):
            if self.correct and self.adversarial_radius > float(radius) > self.certified_radius:
                self.prove(float(radius))
            yield

    def search(self, tol: float) -> None:
        """Search the smallest adversarial radius, then the largest certified one.

        Args:
            tol: a search ends when the lower and upper limit of the radius differ by this share.
        """
        if not self.correct:
            return
        largest = self._find_largest_radius()
        _search_radius(
            examine=self._attack_and_approach,
            read_limits=lambda: (self.unbroken_radius, self.adversarial_radius),
            first=ATTACK_SHARE * largest,
            largest=largest,
            tol=tol,
        )
        # No radius beyond an adversarial example can be proven.
        largest = min(self.adversarial_radius, largest)
        _search_radius(
            examine=self.prove,
            read_limits=self._read_proof_limits,
            first=PROOF_SHARE * largest,
            largest=largest,
            tol=tol,
        )

    def _read_proof_limits(self) -> tuple[float, float]:
        """Return the largest proven radius, or 0, and the smallest broken or unproven radius."""
        unproven = [eps for eps, each in self.certificates.items() if not each.certified]
        return max(self.certified_radius, 0.0), min([self.adversarial_radius, *unproven])

    def _find_largest_radius(self) -> float:
        """Return the largest radius to search.

        This is the diameter of the box of valid inputs in the norm of the proof. For a model
        without a box, it is the norm of the sample.
        """
        x = self.net.point(self.sample)
        is_linf = self.proof.norm == "linf"
        if self.net.box is not None:
            low, high = self.net.box
            width = high - low
            return width if is_linf else width * math.sqrt(x.numel())
        size = x.abs().max() if is_linf else vector_norm(x)
        return float(size)

    def _attack_and_approach(self, eps: float) -> None:
        """Attack one ball; if that succeeds, look for a nearer adversarial example.

        Bisection on the line from the sample to the example finds a misclassified point near the
        sample. The distance of this point becomes the adversarial radius, so that fewer balls have
        to be attacked.
        """
        before = self.adversarial_radius
        self.attack(Radius(text=f"{eps:.6g}", value=Fraction(eps)))
        if self.adversarial_radius == before:  # no attack found a nearer example
            return
        x = self.net.point(self.sample)
        low = 0.0
        high = 1.0  # as a share of the line from sample to example; the class is wrong at `high`
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            with torch.no_grad():
                logits = self.net.forward(torch.lerp(x, self.example, middle), self.sample)
            if int(logits.argmax()) != self.label_to_prove:
                high = middle
            else:
                low = middle
        moved = distance(torch.lerp(x, self.example, high), x, self.proof.norm)
        self.adversarial_radius = min(self.adversarial_radius, float(moved))

    def attack(self, radius: Radius) -> None:
        """Run attacks on one ball until one succeeds, and record the radius.

        If an attack succeeds, `adversarial_radius` is lowered. If all fail, `unbroken_radius` is
        raised.
        """
        # The first outcome is the sample without an attack.
        _, *outcomes = self._run_attacks(self.trials([radius]))
        for outcome in outcomes:
            self.notes += outcome.notes
            if not outcome.robust:
                # The example lies in this ball, and perhaps in a smaller one.
                self.adversarial_radius = min(
                    self.adversarial_radius, float(radius), float(outcome.distance)
                )
                self.example = outcome.x_adv
                return
        self.unbroken_radius = max(self.unbroken_radius, float(radius))

    def prove(self, eps: float) -> None:
        """Try to certify one ball, and record the certificate and the radius."""
        began = time.perf_counter()
        certificate = certify_ball(
            self.net, self.sample, self.label_to_prove, eps, self.proof, self.texts
        )
        self.certificates[eps] = replace(certificate, seconds=time.perf_counter() - began)
        if certificate.certified:
            self.certified_radius = max(self.certified_radius, eps)
        elif certificate.why == "broken":  # the proof itself found a misclassified input
            self.adversarial_radius = min(self.adversarial_radius, eps)

    def _run_attacks(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Yield the outcome without an attack, then the outcome of each attack on the sample.

        Random numbers of the attacks come from `self.seed`, which differs between samples.
        """
        y = torch.tensor([self.label_to_prove], device=self.sample.x.device)
        point = self.net.point(self.sample)
        free = self.net.find_free_tokens(self.sample)  # a mask: True where the sample may change
        chunk = Chunk(number=0, x=point, y=y, mask=free, texts=self.texts)
        model = self.net.make_classifier(self.sample)
        return evaluate_chunk(
            model, chunk, trials, box=self.net.box, seed=self.seed, patch=self.proof.patch
        )


def _search_radius(
    examine: Callable[[float], None],
    read_limits: Callable[[], tuple[float, float]],
    first: float,
    largest: float,
    tol: float,
) -> None:
    """Search the radius up to which a property holds: doubling or halving, then bisection.

    Args:
        examine: finds out whether the property holds at a radius.
        read_limits: returns the largest radius at which the property is known to hold, or 0, and
            the smallest radius at which it is known not to hold.
        first: the first radius to examine.
        largest: the largest radius to examine.
        tol: relative width at which the search ends.
    """
    low, high = read_limits()
    # Until the limits differ by a share `tol`, or even tiny radii were found to fail.
    while low < largest and high > max(low * (1 + tol), SMALLEST_SHARE * largest):
        # If the property holds at `low`: double the radius, but go no further than the geometric
        # mean of the limits (a bisection) or the largest radius. If it never held, begin with
        # `first`, and then halve the radius.
        if low:
            examine(min(2 * low, math.sqrt(low * high), largest))
        else:
            examine(min(first, high / 2))
        low, high = read_limits()
