"""The options of `certify`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from lipaudit.attacks.kinds import Trial, attack_kinds, read_plan, require_suitable
from lipaudit.errors import UsageError
from lipaudit.measures.attack_options import AttackOptions, plan_attacks
from lipaudit.measures.base import AuditRequest, MeasureOptions
from lipaudit.settings.option import Need, needs, option, repeat_option
from lipaudit.settings.value_types import Radii, Regions, TwoCounts
from lipaudit.tables.trials import COUNTED, WHOLE, Norm, Radius, parse_radius
from lipaudit.theory import NODES
from lipaudit.wings.certificates.smoothing import SmoothingOptions

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

BallNorm = Literal["linf", "l2"]

# Options of the smoothed classifier, of which a run without --smooth has no settings.
SMOOTHING_OPTIONS = SmoothingOptions.options()
_repeat_smoothing = partial(repeat_option, SmoothingOptions, need=needs("smooth"), exclude=True)

# Placeholder radii for planning attacks before the radius search: of a ball, and of what counts.
PLACEHOLDER_RADIUS = parse_radius("1/255")
ONE_CHANGE = parse_radius("1")
# Default number of parts into which the values of one place of a patch are split.
PATCH_NODES = 64
# Options that stand beside those that take the place of MODEL.
OPTIONS_WITHOUT_MODEL = {
    "verify": ("verify", "proofs"),
    "instances": ("instances", "order", "attack", "nodes", "seconds"),
}


# Seconds per sample in an audit; a started ball is finished.
AUDIT_SECONDS = 20.0


class CertifyOptions(MeasureOptions):
    """What no attack can break: certified accuracy beside accuracy under attack.

    An attack runs first and breaks what it can. For the other samples lipaudit tries to prove that
    every input in the ball keeps the class. The true robust accuracy is between certified
    accuracy and accuracy under attack. Balls are of pixels in [0, 1], or of token embeddings.
    --eps 1patch certifies that no values in any one patch of an image change the class, and
    --eps 2words that no two near words do.

    --smooth certifies another classifier instead: the majority vote of the model under noise. It
    works for models of any size, and each certificate holds with probability 1 - alpha.

    Examples:
      lipaudit certify demo --radius -n 4
      lipaudit certify demo --smooth 0.25
      lipaudit certify py:model.py:load --data val/ --eps 1/255,2/255 --seconds 20
      lipaudit certify ./my-bert --data reviews.csv --eps 0.01 --norm l2
      lipaudit certify demo --eps 0.005 --export properties/
      lipaudit certify --instances properties/instances.csv -o results.csv
      lipaudit certify ./my-vit --data val/ --eps 1patch
    """

    samples: ClassVar[int] = 8
    scores = "always"
    alone = {
        "instances": "lipaudit.wings.certificates.commands:print_results",
        "verify": "lipaudit.wings.certificates.commands:verify_report",
    }

    eps: Regions = option(
        (), "Radii of pixels in [0, 1] or embeddings: 1/255,0.01. Or 1patch, 2words."
    )
    norm: Literal[BallNorm, "patch", "words"] | None = option(
        None, "linf (default for images), l2 (default for text), patch or words."
    )
    patch_size: int | None = repeat_option(
        AttackOptions,
        "patch_size",
        need=Need("--norm patch", lambda options: options.counted == "patch"),
        rare=True,
    )
    smooth: float | None = _repeat_smoothing("smooth", need=None)
    noise_samples: TwoCounts = _repeat_smoothing("noise_samples")
    alpha: float = _repeat_smoothing("alpha")
    denoiser: str | None = _repeat_smoothing("denoiser")
    radius: bool = option(
        False,
        "Also search for the largest certified radius of every sample.",
        need=Need("a ball, not numbers of changes", lambda options: options.counted is None),
    )
    tol: float = option(
        0.1,
        "Relative accuracy of the radius search.",
        need=Need("--radius", lambda options: options.radius),
        ge=1e-12,  # floats resolve little more
        lt=1,
        rare=True,
    )
    order: Literal["auto", "1", "2"] = option(
        "auto",
        "Proof method: 1 (affine, fast), 2 (quadratic, tighter and slower), or auto "
        "(2 if the input is small).",
        rare=True,
    )
    attack: str | None = option(
        None,
        "Attacks that run first: fgsm,pgd,autoattack, quick or custom:...",
        values=AttackOptions.options()["attack"].values,
        usual="pgd, patch or words",
    )
    nodes: int | None = option(
        None,
        "Largest number of parts into which branch and bound may split a ball, or the values of "
        "each place of a patch.",
        ge=1,
        usual=f"{NODES}, for patches {PATCH_NODES}, no limit with --seconds",
        rare=True,
    )
    seconds: float | None = option(
        None, "Time limit per sample. Results then depend on the machine.", gt=0
    )
    export: Path | None = option(
        None,
        "Also write model (ONNX), balls (VNN-LIB) and instances.csv to a folder.",
        need=Need("--eps", lambda options: options.eps),
        exclude=True,
        metavar="FOLDER",
        rare=True,
    )
    proofs: Path | None = option(
        None,
        "Also write FILE.npz for --verify: the parts of each split ball, with their multipliers.",
        need=Need("balls, not patches or words", lambda options: not options.counted),
        exclude=True,
        rare=True,
    )
    verify: Path | None = option(
        None,
        "Without MODEL: repeat the proofs of this report (JSON) in its run. Balls that were split "
        "are evaluated at the multipliers of --proofs, without a search.",
        exclude=True,
        rare=True,
    )
    instances: Path | None = option(
        None,
        "Without MODEL: prove or break the properties of FILE.csv (model.onnx,property.vnnlib,"
        "seconds in each line), and print results.",
        exclude=True,
        rare=True,
    )
    # Default radii of images.
    usual_eps: Radii = Field((), exclude=True)

    @model_validator(mode="after")
    def _require_possible(self) -> CertifyOptions:
        """Refuse options that have no meaning together."""
        # --verify and --instances take the place of MODEL, and allow few other options.
        for name, allowed in OPTIONS_WITHOUT_MODEL.items():
            if getattr(self, name):
                self._require_only(allowed, f"--{name}")
        # Plan the attacks only to refuse attacks that do not suit the balls. Without --eps any
        # radius shows this.
        radius = ONE_CHANGE if self.counted else PLACEHOLDER_RADIUS
        self.trials(self.eps or (radius,))
        return self

    def _require_only(self, allowed: Sequence[str], use: str) -> None:
        """Refuse options that are set, unless they are allowed beside another option (`use`)."""
        for known in self.options().values():
            if self._differs(known) and known.name not in allowed:
                raise UsageError(
                    f"{known.flags[0]} has no meaning with {use}", "Leave one of the two out."
                )

    @property
    def counted(self) -> Norm | None:
        """Return "patch" or "words" if the radii count changes; None if they are radii of balls.

        The unit is in --eps (1patch), or in --norm if --eps has none.

        Raises:
            UsageError: radii have different units.
        """
        units = {radius.unit for radius in self.eps}
        if len(units) > 1:
            raise UsageError(
                "a run certifies one kind of change, but the units of --eps differ",
                "Run it once for each: --eps 1patch, then --eps 2/255.",
            )
        unit: Any = "".join(units)  # the single unit, or "" if --eps is empty or has none
        if not unit and self.norm in WHOLE:  # the norms that count changes
            unit = self.norm
        return unit or None

    def redirect(self, name: str) -> tuple[str, MeasureOptions]:
        """Return the name and options of the measure to run: `smoothing` with --smooth, else this.

        Args:
            name: the name of this measure, `certify`.

        Raises:
            UsageError: --smooth is combined with an option of proofs or a norm other than L2, or
                an option of smoothing is invalid.
        """
        if self.smooth is None:
            return name, self
        if self.counted:
            raise UsageError(
                f"with --smooth certificates hold for balls, not for changed {self.counted}",
                "Give radii without a unit: --eps 0.25.",
            )
        allowed = [*SMOOTHING_OPTIONS]
        if self.norm == "l2":  # certificates with --smooth are in L2
            allowed.append("norm")
        self._require_only(allowed, "--smooth, which counts votes in L2")
        return "smoothing", SmoothingOptions.parse(
            {n: getattr(self, n) for n in SMOOTHING_OPTIONS}
        )

    def adapt(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options with defaults for a kind of model: norm, radii, attack and limits.

        Args:
            kind: "image", "text" or "tokens".
            changes: the units of its texts that can be changed: words, characters.
            why: why other units cannot be changed, for messages.

        Raises:
            UsageError: an attack or a norm does not suit the kind of model, or there is no radius.
        """
        norm = self.counted or self.norm or ("l2" if kind == "text" else "linf")
        eps = self.eps
        if self.counted:
            # The unit of the radii becomes the norm: --eps 2words becomes --norm words --eps 2.
            # Without --eps, one patch or word is changed.
            eps = tuple(replace(r, text=str(r.value), unit="") for r in eps) or (ONE_CHANGE,)
        elif not eps and kind != "text":  # embeddings of texts have no usual scale
            eps = self.usual_eps
        if not eps and not self.radius:  # a radius search needs no radius
            raise UsageError(
                "no radius was given", "Add one, as in --eps 1/255, or search for it: --radius."
            )
        self._require_provable(norm)
        attack = self.attack or self.counted or "pgd"
        chosen = {"norm": norm, "eps": eps, "nodes": self.most_nodes, "attack": attack}
        # Sets of changed texts have bounds of order 1 only: linear in the change of an embedding.
        if norm == "words":
            chosen["order"] = "1"
        options = self.model_copy(update=chosen)
        # Before a radius search there are no radii: any radius shows whether the attacks suit.
        require_suitable(options.trials(eps or (PLACEHOLDER_RADIUS,)), kind, changes, why)
        return options

    def _require_provable(self, norm: str) -> None:
        """Refuse --export and --order 2 for a norm that they do not support."""
        if self.export is not None and norm != "linf":
            raise UsageError(
                f"--export writes properties of boxes, and a ball of the norm {norm} is none",
                "Add --norm linf.",
            )
        if norm == "words" and self.order == "2":
            raise UsageError("--order 2 has no rule for words", "Leave it out.")

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files to write: instances.csv in the folder of --export, and --proofs."""
        files = []
        if self.export is not None:
            files.append(self.export / "instances.csv")
        if self.proofs is not None:
            files.append(self.proofs)
        return tuple(files)

    @property
    def most_nodes(self) -> int | None:
        """Return into how many parts a ball may be split; None if only --seconds limits it."""
        if self.nodes is not None or self.seconds is not None:
            return self.nodes
        return PATCH_NODES if self.counted == "patch" else NODES

    def choose_patch(self, net: Net) -> tuple[int, int] | None:
        """Return height and width of a patch: --patch-size, or the patch size of the model.

        Return None for balls, or if the patch size of the model is unknown.
        """
        if self.counted != "patch":
            return None
        if self.patch_size is None:
            return net.patch
        return (self.patch_size, self.patch_size)

    def count_inputs(self, net: Net, sample: Batch) -> int:
        """Return how many inputs a proof varies: pixels of patches, near words, or all entries."""
        from lipaudit.attacks.rewriting import NEIGHBOURS
        from lipaudit.wings.certificates.certificate import count_entries

        if self.counted == "words":  # as many near words as considered for each token
            return NEIGHBOURS * sample.x.shape[1]
        patch = self.choose_patch(net)
        if patch is None:  # a ball, or the size of patches is unknown
            return count_entries(net, sample)
        patches = max(map(float, self.eps), default=0)  # with patches, eps is their number
        return int(patches) * net.input_shape[0] * math.prod(patch)

    def trials(self, radii: Sequence[Radius]) -> tuple[Trial, ...]:
        """Return the attacks on these balls (or numbers of patches or words), smallest first.

        Raises:
            UsageError: an attack is unknown, or makes other changes than the certificates cover.
        """
        attack = self.attack or self.counted or "pgd"
        # An attack changes entries in a ball (`counts` is None), or counts changed patches or
        # words. The attacks must make the same changes as those that the certificates cover.
        for name in attack.removeprefix("custom:").split(","):  # a list, or custom:fgsm,pgd
            kind = attack_kinds().get(name.strip())
            if kind is None or kind.counts == self.counted:  # None: a preset of several attacks
                continue
            if kind.counts is None:
                raise UsageError(
                    f"--attack {attack} cannot change {self.counted}",
                    f"Leave it out, or use --attack {self.counted}.",
                )
            raise UsageError(
                f"--attack {attack}: certificates hold for balls, not for changed {kind.counts}",
                "Use --attack pgd.",
            )
        trials = read_plan(attack, norm=self.norm, radii=radii)
        return tuple(sorted(trials, key=lambda trial: trial.radius.value))


def plan_certificates(request: AuditRequest) -> CertifyOptions:
    """Return the options of the certificates in an audit: on the balls that the audit attacks.

    Left out are radius 0, numbers of patches or words, and norms that have no certificates.

    Raises:
        UsageError: for a bad radius, attack or norm.
    """
    attacks = plan_attacks(request)
    return CertifyOptions(
        eps=tuple(radius for radius in attacks.eps if radius.value and not radius.unit),
        usual_eps=attacks.usual_eps,
        norm=attacks.norm if attacks.norm in get_args(BallNorm) else None,
        seconds=AUDIT_SECONDS,
        nodes=NODES,
    )
