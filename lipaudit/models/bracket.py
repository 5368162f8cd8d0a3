"""One sample between attacks and proofs: which balls around it are broken, which are certified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import torch

from lipaudit.attacks.balls import distance
from lipaudit.attacks.evaluate import evaluate_chunk
from lipaudit.attacks.outcome import Chunk, Outcome
from lipaudit.attacks.plan import Trial
from lipaudit.data.batch import Batch
from lipaudit.models.certificate import Certificate, Proof, certificate
from lipaudit.models.net import Net
from lipaudit.results import Note
from lipaudit.results.trials import Radius

START = 2.0**-8
"""Where the search for an adversarial example begins, as a share of the space."""
SHARE = 2.0**-3
"""Where that for a certificate begins, as a share of the adversarial radius."""
HALVINGS = 8
"""Of the way between a sample and an adversarial example."""
LEAST = 2.0**-12
"""Share of the largest radius in question below which a search gives up."""


class Bracket:
    """What is known of the balls around one sample.

    Args:
        net: a classifier.
        sample: one sample.
        proof: how proofs are tried.
        trials: makes the attacks of a ball.
        seed: of their random numbers.

    Attributes:
        label: the true class, -1 where it is unknown.
        predicted: the class that the model gives it.
        clean: how the sample fares without attack.
        correct: whether it is classified rightly; an unknown class is the predicted one.
        stood: largest radius at which attacks found nothing.
        nearest: distance of the nearest adversarial example that they found.
        example: the last one that they found.
        certified: largest radius that was certified; -1 for none.
        tried: what came of the proof at each radius.
        seconds: wall time of it.
        notes: what attacks remark.
    """

    def __init__(
        self,
        net: Net,
        sample: Batch,
        *,
        proof: Proof,
        trials: Callable[[Sequence[Radius]], Sequence[Trial]],
        seed: int,
    ) -> None:
        self.net, self.sample, self.proof = net, sample, proof
        self.trials, self.seed = trials, seed
        with torch.no_grad():
            self.predicted = int(net.output(sample).argmax())
        self.label = -1 if sample.y is None else int(sample.y)
        self.stood, self.nearest, self.certified = 0.0, math.inf, -1.0
        self.tried: dict[float, Certificate] = {}
        self.seconds: dict[float, float] = {}
        self.notes: list[Note] = []
        self.clean = next(self._outcomes(()))
        self.example = self.clean.x_adv
        self.correct = bool(self.clean.robust)

    @property
    def wanted(self) -> int:
        """The class that is to stand."""
        return self.label if self.label >= 0 else self.predicted

    def settle(self, radii: Sequence[Radius]) -> Iterator[None]:
        """Settle some balls, and yield after each.

        Attacks go outwards until one succeeds, which breaks all larger balls; proofs go inwards
        until one succeeds, which holds for all smaller ones.
        """
        ordered = sorted(radii, key=float)
        for radius in ordered:
            if self.correct and self.nearest > float(radius):
                self.attack(radius)
        for radius in reversed(ordered):
            if self.correct and self.nearest > float(radius) > self.certified:
                self.prove(float(radius))
            yield

    def search(self, tol: float) -> None:
        """Search for the smallest adversarial radius, then for the largest certified one."""
        if not self.correct:
            return
        most = self._most()
        _search(self._attacked, lambda: (self.stood, self.nearest), (START * most, most), tol)
        reach = min(self.nearest, most)
        _search(self.prove, self._proven, (SHARE * reach, reach), tol)

    def attack(self, radius: Radius) -> None:
        """Attack one ball, until something breaks it."""
        _, *outcomes = self._outcomes(self.trials([radius]))
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
        self.tried[eps] = certificate(self.net, self.sample, self.wanted, eps, self.proof)
        self.seconds[eps] = time.perf_counter() - began
        if self.tried[eps].certified:
            self.certified = max(self.certified, eps)

    def _attacked(self, eps: float) -> None:
        """Attack a ball, and move what is found towards the sample while it stays broken."""
        known = self.nearest
        self.attack(Radius(f"{eps:.6g}", Fraction(eps)))
        if self.nearest < known:
            self.nearest = min(self.nearest, self._nearer())

    def _nearer(self) -> float:
        """Return how near on the line to the sample the example that was found still is one."""
        x, low, high = self.net.point(self.sample), 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            with torch.no_grad():
                logits = self.net.forward(torch.lerp(x, self.example, middle), self.sample)
            low, high = (low, middle) if int(logits.argmax()) != self.wanted else (middle, high)
        return float(distance(torch.lerp(x, self.example, high), x, self.proof.norm))

    def _proven(self) -> tuple[float, float]:
        """Return the largest certified radius, and the smallest that is not."""
        refused = (eps for eps, each in self.tried.items() if not each.certified)
        return max(self.certified, 0.0), min([self.nearest, *refused])

    def _most(self) -> float:
        """Return the largest radius in question: the space's width, or the sample's size."""
        point, linf = self.net.point(self.sample), self.proof.norm == "linf"
        if self.net.box is None:
            return float(point.abs().max() if linf else torch.linalg.vector_norm(point))
        width = self.net.box[1] - self.net.box[0]
        return width if linf else width * math.sqrt(point.numel())

    def _outcomes(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Run attacks, the sample without attack first; its random numbers are its own."""
        y = torch.tensor([self.wanted], device=self.sample.x.device)
        chunk = Chunk(0, self.net.point(self.sample), y, self.net.free(self.sample))
        model = self.net.classifier(self.sample)
        return evaluate_chunk(model, chunk, trials, box=self.net.box, seed=self.seed)


def _search(
    look: Callable[[float], None],
    known: Callable[[], tuple[float, float]],
    reach: tuple[float, float],
    tol: float,
) -> None:
    """Search for the radius up to which something holds: doubling or halving, then bisection.

    Args:
        look: looks at a radius.
        known: returns the largest radius at which it is known to hold, or 0, and the smallest at
            which it is known not to.
        reach: where to begin, and the largest radius in question.
        tol: relative width at which it ends.
    """
    first, most = reach
    low, high = known()
    while low < most and high > max(low * (1 + tol), LEAST * most):
        if low:
            look(min(2 * low, math.sqrt(low * high), most))
        else:
            look(min(first, high / 2))
        low, high = known()
