"""The options of each measure, and those that several measures share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from lipaudit.attacks.kinds import ATTACKS, attack_kinds
from lipaudit.attacks.plan import CHUNK, PRESETS, Trial, read_plan, require_suited
from lipaudit.errors import UsageError
from lipaudit.results.trials import COUNTED, Norm, Radius, parse_budget, parse_radius
from lipaudit.settings.option import Need, Settings, needs, option
from lipaudit.settings.parsing import (
    Balls,
    Layers,
    Lengths,
    Names,
    Radii,
    distinct,
    listed,
    read_head,
)
from lipaudit.theory.policy import LAYER_WITHIN, NODES, TOL, WITHIN


class MeasureOptions(Settings):
    """Options of a measure; they become the section's `settings`.

    The docstring of a subclass is the help of its command.

    Attributes:
        seed: of everything random.
        layers: which attention layers; None is all.
    """

    samples: ClassVar[int] = 8
    """How many samples it takes when nobody says."""
    once: ClassVar[Mapping[str, Any]] = {}
    """What reports that are older than an option, and do not have it, were measured with."""
    labelled: ClassVar[bool] = False
    """Whether it needs labels."""
    reads_heads: ClassVar[bool] = False
    """Whether it needs attention heads."""
    scores: ClassVar[Literal["never", "asked", "always"]] = "never"
    """When it has a language model score continuations: it may read texts alone, do so where
    --score is given, or have no other way to measure one."""

    seed: int = 0
    layers: Layers = None

    @property
    def tokens(self) -> int | None:
        """Of how many tokens texts have to be, where the measure needs long ones."""
        return None

    @property
    def draws(self) -> bool:
        """Whether there will be an attention map, which is what a PNG shows."""
        return False

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return ()

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options for a kind of model: image, tokens or text.

        Args:
            kind: of the model.
            changes: what can be changed of its texts: words, characters.
            why: what keeps the rest from being changed.

        Raises:
            UsageError: what they ask for means nothing for such a model.
        """
        return self

    def unkept(self) -> dict[str, Any]:
        """Return the options that can be typed and are no settings of the report."""
        return {n: getattr(self, n) for n in self.options() if n not in self.model_dump()}

    def outline(self, samples: int) -> str:
        """Say before it begins what will be measured, where that is not obvious."""
        return ""


class NormOptions(MeasureOptions):
    """Options of a measure that takes norms by Lanczos steps.

    Attributes:
        tol: relative accuracy of the norms, estimated.
        max_steps: most Lanczos steps per norm.
        within: how far the probabilistic limit may lie above a norm: what is proven.
    """

    tol: float = option(TOL, "Estimated relative accuracy of the norms.", gt=0, lt=1)
    max_steps: int = 300
    within: float = option(
        WITHIN, "Proven relative accuracy of the norms (prob. 0.999).", gt=0, allow_inf_nan=False
    )

    @property
    def accuracy(self) -> dict[str, Any]:
        """What the solver is asked for."""
        return {"tol": self.tol, "max_steps": self.max_steps, "within": self.within}


class AttentionOptions(MeasureOptions):
    """How each head distributes its attention, and which heads are in the fragile regime.

    A row is intermediate (fragile) when g1 = p(1) (1 - p(1) + p(2)) exceeds gamma.

    [dim]Examples:[/]
      [cyan]lipaudit attention demo[/]
      [cyan]lipaudit attention demo --map 1.3 -o map.png[/]
      [cyan]lipaudit attention ./my-bert --data reviews.csv --map 3.1 --query 0[/]
    """

    samples: ClassVar[int] = 32
    reads_heads: ClassVar[bool] = True

    layers: Layers = option(None, "Only these attention layers, e.g. 0,5-7.")
    gamma: float = option(0.1, "Rows with g1 above it are intermediate.", gt=0, lt=0.25)
    k: int = option(10, "The k of g1/gk.", gt=1)
    p_norm_tokens: int = option(2048, "Leave ||P|| out above this many tokens.", ge=0)
    # Neither of the two is a setting of the report: they change no number.
    map: str | None = option(
        None, "Draw the map of LAYER.HEAD on the first sample; -o map.png too.", exclude=True
    )
    query: int | None = option(
        None,
        "With --map: draw this row of it, the mean over the samples.",
        exclude=True,
        need=needs("map"),
        ge=0,
    )

    candidates: tuple[str, ...] = Field((), exclude=True)
    """Heads whose maps are kept while it is not known yet which is drawn."""

    @field_validator("map")
    @classmethod
    def _named(cls, text: str | None) -> str | None:
        return None if text is None else "{}.{}".format(*read_head(text))

    @property
    def draws(self) -> bool:
        """Whether there will be an attention map, which is what a PNG shows."""
        return self.map is not None


class BoundsOptions(NormOptions):
    """Lipschitz bounds of every attention head beside its exact Jacobian norm.

    For each head: the exact norm ||J|| of its Jacobian on each sample, and the upper bounds of
    Hu 2024, Castin 2024, Yudin 2025 and lipaudit's own, far tighter one (sharp).

    --radius goes beyond the samples: for every head a Lipschitz constant on the ball of that
    radius around the tokens X of its layer, certified, and the largest norm that gradient ascent
    finds there.

    --input module takes the norms in what the module around each layer takes, where that is
    something else than the projections read: numerically, and without bounds.

    [dim]Examples:[/]
      [cyan]lipaudit bounds demo[/]
      [cyan]lipaudit bounds demo --radius 0.01,0.03,0.1[/]
      [cyan]lipaudit bounds timm:vit_base_patch16_224 --data photos/ --samples 16[/]
      [cyan]lipaudit bounds ./my-bert --data reviews.csv --layers 0,5-7 -o bounds.json[/]
    """

    reads_heads: ClassVar[bool] = True

    once: ClassVar[Mapping[str, Any]] = {
        "concat": True,
        "layer_within": WITHIN,
        "splitting": True,
    }

    radius: Balls = option(
        (),
        "Also on balls ||X' - X||_F <= r of token space: 0.03 or 0.01,0.03.",
        need=Need("--input projections", lambda options: options.input == "projections"),
    )
    layers: Layers = option(None, "Only these attention layers, e.g. 0,5-7.")
    input: Literal["projections", "module"] = option(
        "projections", "Norms in what the projections read, or what their module takes."
    )
    concat: bool = option(False, "Also norms of each layer's heads side by side, before W_O.")
    splitting: bool = option(False, "Also how much the norm of each head grows by copied tokens.")
    layer_within: float = option(
        LAYER_WITHIN,
        "Proven relative accuracy of the norms of layers (prob. 0.999).",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def layer_accuracy(self) -> dict[str, Any]:
        """What the solver is asked for where a norm is that of a layer."""
        return self.accuracy | {"within": self.layer_within}


StartPoint = Literal["pixels", "embeddings"]
ENDS = ("logits", "probabilities", "loss", "hidden", "features", "tokens")
PLACED = ("logits", "probabilities", "hidden")
"""Ends that may be asked for at a position of a text."""
POSITION = re.compile(r"last|all|-?\d{1,9}")


class Target(NamedTuple):
    """What is differentiated.

    Attributes:
        what: one of `ENDS`.
        where: the position of a text: last, all, or its number among the tokens that are not
            padded, from 0, from the end where negative; empty: not said.
    """

    what: str
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `loss`, `logits` or `logits:5`.

        Raises:
            ValueError: when it is none of these.
        """
        what, colon, where = text.partition(":")
        placed = what in PLACED and POSITION.fullmatch(where)
        if what not in ENDS or (colon and not placed):
            raise ValueError(
                f"it must be {', '.join(ENDS[:-1])} or {ENDS[-1]}; {', '.join(PLACED)} take a "
                "position: logits:5, logits:-2, logits:last, logits:all"
            )
        return cls(what, where)

    @property
    def text(self) -> str:
        """As it is typed."""
        return ":".join(filter(None, self))


def _an_end(text: str) -> str:
    return Target.parse(text).text


EndPoint = Annotated[str, AfterValidator(_an_end)]
"""What a Jacobian is of, as `Target` reads it."""


def _decides(options: JacobianOptions) -> bool:
    what, where = Target.parse(options.target or "logits")
    return what == "logits" and where != "all"


OF_CLASSES = Need("--to logits", _decides)


class JacobianOptions(NormOptions):
    """The exact norm of the whole model's Jacobian, sample by sample.

    With class scores also, per sample, the margin and the first-order radius: indicative at a
    point, never a certificate.

    [dim]Examples:[/]
      [cyan]lipaudit jacobian demo[/]
      [cyan]lipaudit jacobian demo --per-layer[/]
      [cyan]lipaudit jacobian timm:vit_tiny_patch16_224 --data photos/ --from embeddings[/]
      [cyan]lipaudit jacobian ./my-bert --data reviews.csv --to features[/]
      [cyan]lipaudit jacobian ./qwen --data book.txt --to loss[/]
      [cyan]lipaudit jacobian ./qwen --data book.txt --to logits:all[/]
    """

    samples: ClassVar[int] = 64
    scores = "asked"

    start: StartPoint | None = option(None, "pixels or embeddings; text: embeddings.", "--from")
    target: EndPoint | None = option(
        None,
        "logits, probabilities, loss, hidden, features or tokens; at a position: logits:5.",
        "--to",
        values=lambda: (*ENDS, *(f"{end}:all" for end in PLACED)),
    )
    norm: Literal["2", "inf"] = option("2", "2 (spectral), or inf (largest L1 row norm).")
    rivals: int = option(
        16, "Most classes to look at for the first-order radius.", need=OF_CLASSES, ge=1
    )
    per_layer: bool = option(False, "Also the norm of every block, input to output.")

    @model_validator(mode="after")
    def _spectral(self) -> JacobianOptions:
        if self.per_layer and self.norm != "2":
            raise UsageError(
                "the norms of blocks are spectral", "Leave out --norm or --per-layer."
            )
        return self


ScalingMode = Literal["real", "adversarial", "radius", "ascent", "split"]
WORST = Need("a --mode of worst cases, which real is not", lambda o: {*o.modes} != {"real"})
ScalingModes = Annotated[tuple[ScalingMode, ...], listed]


class ScalingOptions(MeasureOptions):
    """How the norms of attention layers and of the model grow with the number of tokens.

    [dim]Modes:[/]
      real         your samples at growing lengths: text cut, images resized
      adversarial  worst-case tokens: the norm grows like sqrt n up to n_max
      radius       the same tokens at growing radius
      ascent       the largest norm that searches find within the radius
      split        every token duplicated, and attacks that do so first (on request)

    [dim]Examples:[/]
      [cyan]lipaudit scaling demo[/]
      [cyan]lipaudit scaling ./my-bert --data book.txt --lengths 8:512:log7 -n 8[/]
      [cyan]lipaudit scaling ./my-bert --mode adversarial --heads 0.8,5.11[/]
      [cyan]lipaudit scaling timm:vit_tiny_patch16_224 --lengths 16:196:log4[/]
    """

    samples: ClassVar[int] = 4
    reads_heads: ClassVar[bool] = True

    lengths: Lengths = option("8:256:log8", "Tokens, FIRST:LAST:logCOUNT.")
    modes: ScalingModes = option(
        "real,adversarial,radius,ascent",
        "real, adversarial, radius, ascent, split (comma-separated).",
        "--mode",
        min_length=1,
    )
    layers: Layers = option(None, "Only these attention layers, e.g. 0,5-7.")
    heads: Names = option(
        None, "Also these heads: 0.8,5.11 or all. Default: the strongest per layer."
    )
    radius: Annotated[float, Field(gt=0, le=1e6)] | None = option(
        None, "Worst case at this radius beside the layer's own.", need=WORST
    )
    mask: Literal["own", "none", "causal", "both"] = option(
        "own", "Mask of the worst case: own, none, causal or both.", need=WORST
    )
    tol: float = option(TOL, "Estimated relative accuracy of the norms.", gt=0, lt=1)

    @property
    def tokens(self) -> int | None:
        """Of how many tokens texts have to be, where the measure needs long ones."""
        return max(self.lengths) if "real" in self.modes else None

    def outline(self, samples: int) -> str:
        """Say before it begins what will be measured, where that is not obvious."""
        heads = "the strongest head of each layer" if self.heads is None else "the heads given"
        on_data = {"real", "split"} & set(self.modes)
        worst = [mode for mode in self.modes if mode != "real"]
        parts = [
            f"{samples} samples at {len(self.lengths)} lengths" if on_data else "",
            f"{', '.join(worst)} of {heads}" if worst else "",
        ]
        return "; ".join(filter(None, parts))


IMAGES = "fgsm,pgd,autoattack"
TEXTS = ",".join(COUNTED)
EMBEDDINGS = "fgsm,pgd"
"""What attacks images, texts, and the embeddings of texts, where no attack is named."""
TABLE = ".jsonl"
"""Files of changed texts."""


def _attack(*efforts: str) -> Need:
    """Return the need of an option that goes with attacks of a certain effort."""

    def holds(options: AttackOptions) -> bool:
        if options.attack is None or not (options.eps or options.attack == "paper"):
            return True  # what will run is not known yet: `suited` asks again
        planned = (attack for trial in options.trials() for attack in trial.attacks)
        return any(attack.kind.effort in efforts for attack in planned)

    known = ", ".join(name for name, kind in ATTACKS.items() if kind.effort in efforts)
    return Need(f"an attack that takes {' or '.join(efforts)}: {known}", holds)


class AttackOptions(MeasureOptions):
    """Adversarial accuracy under FGSM, PGD and AutoAttack, sample by sample.

    The radius is in pixel space [0, 1]; normalisation happens inside the model. Texts are changed
    word by word or character by character, so many of them; with --eps, or by fgsm and pgd, the
    perturbation is added to their token embeddings. Of language models what they score behind a
    prompt is attacked, in the embeddings of that: continuations, choices, labels (--score).

    [dim]Examples:[/]
      [cyan]lipaudit attack demo --eps 0.1[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --eps 1/255,2/255[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --attack paper[/]
      [cyan]lipaudit attack ./bert --data reviews.csv --attack words --eps 1,2[/]
      [cyan]lipaudit attack ./gpt2 --data questions.jsonl --eps 0.1[/]
    """

    samples: ClassVar[int] = 128
    labelled: ClassVar[bool] = True
    scores = "always"

    eps: Radii = option(
        (),
        "Radii in pixel space [0, 1]: 2/255 or 1/255,0.03; for words and characters: how many.",
    )
    attack: str | None = option(
        None,
        f"Comma-separated, default {IMAGES}; or standard, quick, lean, paper, custom:...; "
        f"of texts {TEXTS}; of embeddings {EMBEDDINGS}.",
        values=lambda: ("autoattack", *PRESETS, *attack_kinds()),
    )
    norm: Norm | None = option(
        None, "linf (default of images), l2, or token-l2 (default of text)."
    )
    steps: int | None = option(
        None, "Iterations of each attack, in place of its own number.", need=_attack("steps"), gt=0
    )
    restarts: int | None = option(None, "Random starts.", need=_attack("steps", "queries"), gt=0)
    queries: int | None = option(
        None,
        "Most queries of Square; of words and characters for every change.",
        need=_attack("queries", "edits"),
        gt=0,
    )
    save_adv: Path | None = option(
        None,
        "Write the adversarial examples, as --data reads them: .safetensors, or .jsonl of "
        "words and characters. Of texts .safetensors has embeddings, which it does not read.",
        exclude=True,
    )
    usual: str = Field(IMAGES, exclude=True)
    """Attacks of images where none is named."""
    usual_eps: Radii = Field((), exclude=True)
    """Their radii where none is given."""
    logical_chunk: Literal[64] = CHUNK
    """Samples that share a random stream: recorded, and never another number."""
    batch_size: int = Field(CHUNK, exclude=True)
    """Samples on the device at a time; changes nothing else."""

    @field_validator("save_adv")
    @classmethod
    def _tensors(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix not in (".safetensors", TABLE):
            raise ValueError(f"it must end in .safetensors, or {TABLE} for changed texts")
        return path

    @field_validator("attack")
    @classmethod
    def _once(cls, names: str | None) -> str | None:
        for part in (names or "", (names or "").partition(":")[2]):
            distinct([name.strip() for name in part.split(",") if name.strip()])
        return names

    @model_validator(mode="after")
    def _possible(self) -> AttackOptions:
        if self.attack is not None and (self.eps or not self.usual_eps):
            self.trials()
        return self

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Fill in the attacks, norm and radii that a kind of model usually gets, and check them.

        Raises:
            UsageError: an attack or a norm means nothing for it, or there is no radius.
        """
        text = kind == "text"
        counted = next((radius for radius in self.eps if radius.unit), None)
        if counted is not None and not text:
            raise UsageError(
                f"the radius {counted.text} counts {counted.unit} of a text, and the model takes "
                f"{'images' if kind == 'image' else 'sequences of vectors'}",
                "Give a radius without a unit: --eps 2/255.",
            )
        meant = dict.fromkeys(radius.unit or EMBEDDINGS for radius in self.eps)
        of_text = ",".join(meant or [name for name in COUNTED if name in changes]) or EMBEDDINGS
        attack = self.attack or (of_text if text else self.usual)
        own = attack == "paper" or (text and attack != EMBEDDINGS)
        eps = self.eps if self.eps or own else self.usual_eps
        named = self.model_copy(update={"attack": attack, "eps": eps})
        named.require_needed()
        trials = named.trials()
        require_suited(trials, kind, changes, why)
        named._require_file(trials)
        return named._filled(trials, "token-l2" if text else "linf")

    def _filled(self, trials: Sequence[Trial], usual: Norm) -> Self:
        """Name the norm of the balls, if there are any, and the radii, if none were given."""
        counted = [trial for trial in trials if trial.norm in COUNTED]
        norm = self.norm or (usual if len(counted) < len(trials) else None)
        eps = self.eps or tuple(parse_budget(f"{t.radius.text}{t.norm}") for t in counted)
        return self.model_copy(update={"norm": norm, "eps": eps})

    def _require_file(self, trials: Sequence[Trial]) -> None:
        """Refuse a file that cannot hold what the attacks give."""
        table = self.save_adv is not None and self.save_adv.suffix == TABLE
        if self.save_adv is not None and any((t.norm in COUNTED) != table for t in trials):
            raise UsageError(
                f"--save-adv {self.save_adv} cannot hold what all of these attacks give",
                f"Changed texts go to a {TABLE} file, perturbed samples to a .safetensors file: "
                "name one, and with --attack such attacks only.",
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return () if self.save_adv is None else (self.save_adv,)

    def trials(self) -> tuple[Trial, ...]:
        """Return what is run: attacks one after the other, in each ball.

        Raises:
            UsageError: an unknown attack, or no radius.
        """
        return read_plan(
            self.attack or self.usual,
            norm=self.norm,
            radii=self.eps,
            steps=self.steps,
            restarts=self.restarts,
            queries=self.queries,
        )


BallNorm = Literal["linf", "l2"]
SOME = parse_radius("1/255")
"""A radius to plan attacks with where only a search will say of which."""


class CertifyOptions(MeasureOptions):
    """What no attack can break: certified accuracy beside accuracy under attack.

    An attack runs first and settles what can be broken; of the other samples it is proven, where
    the proof succeeds, that no input of the ball is classified otherwise. The true robust
    accuracy lies between the two. Balls are of pixels in [0, 1], or of token embeddings.

    [dim]Examples:[/]
      [cyan]lipaudit certify demo --eps 0.005[/]
      [cyan]lipaudit certify demo --radius -n 4[/]
      [cyan]lipaudit certify py:model.py:load --data val/ --eps 1/255,2/255 --seconds 20[/]
      [cyan]lipaudit certify ./my-bert --data reviews.csv --eps 0.01 --norm l2[/]
    """

    samples: ClassVar[int] = 8
    scores = "always"

    eps: Balls = option(
        (), "Radii of pixels in [0, 1] or of token embeddings: 1/255 or 1/255,0.01."
    )
    norm: BallNorm | None = option(None, "linf (default of images) or l2 (of text).")
    radius: bool = option(False, "Also the largest certified radius of every sample.")
    tol: float = option(
        0.1,
        "Relative width at which the search for a radius ends.",
        need=Need("--radius", lambda options: options.radius),
        gt=0,
        lt=1,
    )
    order: Literal["auto", "1", "2"] = option(
        "auto", "1 (affine forms), 2 (quadratic: tighter, dearer), or auto: 2 for few inputs."
    )
    attack: str = option(
        "pgd",
        "What runs first: fgsm, pgd, autoattack (comma-separated), quick, or custom:...",
        values=AttackOptions.options()["attack"].values,
    )
    nodes: int | None = option(
        None,
        "Parts of a ball that branch and bound looks at, at most.",
        ge=1,
        usual=f"{NODES}, without limit beside --seconds",
    )
    seconds: float | None = option(
        None,
        "Time limit of a sample: results then depend on the machine.",
        gt=0,
    )
    usual_eps: Radii = Field((), exclude=True)
    """Radii of images where none is given."""

    @model_validator(mode="after")
    def _possible(self) -> CertifyOptions:
        self.trials(self.eps or (SOME,))
        return self

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Fill in the norm and the radii that a kind of model usually gets, and check them.

        Raises:
            UsageError: an attack or a norm means nothing for it, or there is no radius.
        """
        norm: BallNorm = self.norm or ("l2" if kind == "text" else "linf")
        eps = self.eps if self.eps or kind == "text" else self.usual_eps
        if not eps and not self.radius:
            raise UsageError(
                "no radius was given", "Add one, as in --eps 1/255, or search for it: --radius."
            )
        filled = self.model_copy(update={"norm": norm, "eps": eps, "nodes": self.most_nodes})
        require_suited(filled.trials(eps or (SOME,)), kind, changes, why)
        return filled

    @property
    def most_nodes(self) -> int | None:
        """The limit of parts of a ball; None: --seconds, given alone, is the only limit."""
        return NODES if self.nodes is None and self.seconds is None else self.nodes

    def outline(self, samples: int) -> str:
        """Say before it begins which limits hold."""
        return f"{samples} samples; limits of a proof: {self.limits}"

    @property
    def limits(self) -> str:
        """What ends a proof, and whether the user or a default says so."""
        most, seconds = self.most_nodes, self.seconds
        time = "no time limit (default)" if seconds is None else f"{seconds:g} s (--seconds)"
        if most is None:
            return f"{time}, no limit of parts of a ball (default beside --seconds)"
        by = "default" if self.nodes is None else "--nodes"
        return f"{time}, {most:,} parts of a ball ({by})"

    def trials(self, radii: Sequence[Radius]) -> tuple[Trial, ...]:
        """Return what attacks these balls, the smallest first.

        Raises:
            UsageError: an unknown attack, or one that searches no balls.
        """
        named = self.attack.removeprefix("custom:").split(",")
        for kind in (attack_kinds().get(name.strip()) for name in named):
            if kind is not None and kind.counts:
                raise UsageError(
                    f"--attack {self.attack}: certificates are of balls, not of changed "
                    f"{kind.counts}",
                    "Use --attack pgd.",
                )
        planned = read_plan(self.attack, norm=self.norm, radii=radii)
        return tuple(sorted(planned, key=lambda trial: trial.radius.value))
