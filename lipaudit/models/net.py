"""A model for all measures: its description by its source, and the functions that call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lipaudit.attacks.oracle import ByRow, Classifier
from lipaudit.attacks.text import Lexicon
from lipaudit.data.arrays import SampleForm
from lipaudit.data.batch import Batch
from lipaudit.data.hub import Commit
from lipaudit.data.image_files import Preprocessing
from lipaudit.errors import UsageError
from lipaudit.models.precision import borrow_gradient, deploy, find_dtype, list_devices
from lipaudit.tables import Note, Notes
from lipaudit.tables.trials import Norm

# Note on a model with random weights on request.
RANDOM = Note.warn(
    "random-weights",
    "RANDOM WEIGHTS: no weights were loaded, so the results say nothing about a trained model",
)


def new_classifier(classes: int) -> Note:
    """Return the note on a requested new classifier with random weights."""
    return Note.warn(
        "new-classifier", f"the classifier for {classes} classes is new and random: train it first"
    )


@contextmanager
def watch_modules(
    parts: Iterable[tuple[str, nn.Module]], see: Callable[[str, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Call `see(name, arguments, output)` after every call of some modules, inside the block.

    Args:
        parts: the modules with their names.
        see: gets the name, the arguments and the output of a module. If the result is not None, it
            replaces the output.
    """
    with ExitStack() as hooks:
        for name, part in parts:
            # The default value keeps this module's name. Without it, all hooks would read the name
            # of the last module.
            def run_hook(_module: nn.Module, args: Any, output: Any, name: str = name) -> Any:
                return see(name, args, output)

            hooks.enter_context(part.register_forward_hook(run_hook))
        yield


Kind = Literal["image", "tokens", "text"]
# Runs a model on (samples, mask), and reads the output tensor from the result.
Call = Callable[[Tensor, Tensor | None], Any]
Read = Callable[[Any], Tensor]
# One number for each channel of an image, or one for all channels.
PerChannel = tuple[float, ...]
OutputForm = Literal["logits", "log-probabilities", "probabilities", "sigmoids"]


@dataclass(frozen=True)
class NextToken:
    """How a causal language model scores the next token, at every position of a text.

    Attributes:
        head: the linear map from the last hidden states, (batch, tokens, width), to the
            vocabulary; entry-wise functions may follow.
        read: returns the logits, (batch, tokens, vocabulary), from a result of `call`.
    """

    head: nn.Module
    read: Read


@dataclass(frozen=True)
class ModelSpec:
    """A model and the description of its input and output; a `py:` factory may return one.

    Attributes:
        module: the model. Loading puts it in eval mode, freezes its parameters and may move it to
            another device or dtype: build a fresh one if you need it elsewhere.
        input_shape: shape of one sample: (channels, height, width), (tokens, width) or
            (samples,) of a waveform, or (most tokens,) for text. Floats of the kind tokens may
            have more axes: (channels, frames, height, width). A number n stands for
            (3, n, n) of an image, else for (n,).
        kind: image, tokens (a float sequence) or text (token ids).
        mean: subtracted from the pixels, per channel or one for all; images only.
        std: divides the pixels after that.
        box: smallest and largest value of an input; images default to (0, 1), others to None.
        classifier: whether the columns of the output are classes; else they are features.
        labels: class names by index.
        aliases: other names of the classes that data sets may use.
        vocabulary: number of token ids; text only.
        next_token: how the model scores the next token; causal language models only.
        tokenize: text -> token ids with special tokens, cut to a number of tokens; text only.
        tokenize_pair: two texts -> token ids of both, likewise; text only.
        pad_id: the id that fills shorter samples, and no token of a text; None: 0 fills them, and
            may be a token. Text only.
        end_id: the id that every text must end with, if the model needs one; text only.
        unknown_id: the id of unknown tokens, if the vocabulary has one; text only.
        lexicon: returns the words of the token ids, for attacks that change texts; by default
            every id except pad_id (or 0) and end_id is a word.
        next_logits: scores continuations with a causal language model: (embeddings, first) ->
            logits of the token behind each position from `first` on; text only.
        prepare: PIL image -> (channels, height, width) in [0, 1]; by default resized and cropped
            to the input shape.
        call: runs the module on (x, mask), x normalised; by default `module(x)`, or `module(x,
            mask)` if a sample is padded.
        read: returns the output tensor of a result; by default the result or its `logits`.
        entry: the embedding module; by default the first `nn.Embedding` that takes the ids of a
            text model, or `patch_embed` of an image model.
        architecture: name for the report; by default the class of the module.
        preprocess: further facts on preprocessing, for the report.
        quantised: how its weights are quantised, for the report; empty if they are not.
        notes: remarks on loading, shown with the results.
        commit: the commit of the repository of the Hub.
    """

    module: nn.Module
    input_shape: tuple[int, ...]
    _: KW_ONLY
    kind: Kind = "image"
    mean: PerChannel | None = None
    std: PerChannel | None = None
    box: tuple[float, float] | None = None
    classifier: bool = True
    labels: tuple[str, ...] | None = None
    aliases: Mapping[str, int] = field(default_factory=dict)
    vocabulary: int | None = None
    next_token: NextToken | None = None
    tokenize: Callable[[str, int], list[int]] | None = None
    tokenize_pair: Callable[[str, str, int], list[int]] | None = None
    pad_id: int | None = None
    end_id: int | None = None
    unknown_id: int | None = None
    lexicon: Callable[[], Lexicon] | None = None
    next_logits: Callable[[Tensor, int], Tensor] | None = None
    prepare: Callable[[Image], Tensor] | None = None
    call: Call | None = None
    read: Read | None = None
    entry: nn.Module | None = None
    architecture: str = ""
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    quantised: str = ""
    notes: Notes = ()
    commit: Commit | None = None

    def __post_init__(self) -> None:
        """Complete short forms of the user: a number as shape, mean or std becomes a tuple."""
        # `object.__setattr__`, because the dataclass is frozen.
        shape: Any = self.input_shape
        if isinstance(shape, int) and self.kind == "image":
            shape = (3, shape, shape)
        elif isinstance(shape, int):
            shape = (shape,)
        object.__setattr__(self, "input_shape", tuple(shape))
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, int | float):  # one for all channels
                object.__setattr__(self, name, (value,))


@dataclass(frozen=True)
class LoadOptions:
    """The user's options for a model, beyond its name.

    Attributes:
        arch: architecture of a file of weights, `timm:NAME` or `py:FILE:FACTORY`.
        model_kwargs: arguments of the architecture; `pretrained=False` asks for random weights.
        mean: overrides the mean of the normalisation, per channel or one for all.
        std: overrides its standard deviation.
        input_size: overrides the shape of one image: (side,), (height, width) or
            (channels, height, width).
        device: where to run; "auto" is the CUDA device if there is one, else the CPU.
        dtype: precision of the parameters.
        weights: converted (to `dtype` on loading) or stored (converted layer by layer when used).
        quantize: rounds the weights of linear layers on loading: int8 or int4, with the size of
            groups of inputs after a colon.
        device_map: placement of the weights over devices, CPU and disk: auto, balanced or a JSON
            file (module name -> device, cpu or disk); None: `device` holds all.
        offline: never open a connection; only what is on this machine.
        classes: number of classes; a model with another number gets a new random classifier (to be
            trained; timm and transformers).
        tower: image or text, for models with two towers.
        class_names: names that make a zero-shot classifier of an image-text model.
        prompts: its texts, with {} for the name of a class; their embeddings are averaged.
        labels: names of the classes, in the order of the outputs; in place of the model's own.
        preprocess: how images get the model's size: model (its own steps, for images of that size,
            too), resize (scaled and cropped in the middle), none (others are refused), or None:
            images of that size stay, others go through the model's steps.
        forms: returns the possible readings of the data, for modules that do not declare their
            input.
    """

    arch: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mean: PerChannel | None = None
    std: PerChannel | None = None
    input_size: tuple[int, ...] | None = None
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    weights: Literal["converted", "stored"] = "converted"
    quantize: str | None = None
    device_map: str | None = None
    offline: bool = False
    classes: int | None = None
    tower: str | None = None
    class_names: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    preprocess: Preprocessing | None = None
    forms: Callable[[], tuple[SampleForm, ...]] = tuple

    @property
    def pretrained(self) -> bool:
        """Whether trained weights are wanted, not random ones."""
        return bool(self.model_kwargs.get("pretrained", True))

    @property
    def building(self) -> dict[str, Any]:
        """The arguments of the architecture itself: `model_kwargs` without `pretrained`."""
        return {key: v for key, v in self.model_kwargs.items() if key != "pretrained"}

    def image_shape(self, known: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (channels, height, width) of an image: `input_size`, completed by a known shape.

        The known shape is the one that the source of the model declares.

        Raises:
            UsageError: `input_size` is not a shape.
        """
        size = self.input_size
        channels, height, width = known
        if size is None:
            return channels, height, width
        if not 1 <= len(size) <= 3 or min(size) < 1:
            raise UsageError(
                f"input size {size} is not a shape",
                "Give one side (32), height and width (32,32), or channels, height and width "
                "(3,32,32).",
            )
        if len(size) == 1:  # a square
            size = (*size, *size)
        if len(size) == 2:
            size = (channels, *size)
        channels, height, width = size
        return channels, height, width


# Source of a module object that has no MODEL name.
OWN = "module"
# Code of the note on a model without a class decision, such as a multi-label model.
NO_DECISION = "no-decision"
# Code of the note on names of classes in a configuration that do not fit its outputs.
UNUSED_NAMES = "class-names-unused"
# Why attacks cannot change the texts of a model (see `Net.changes`).
NEEDED = "this needs an embedding table, and a fast tokenizer beside config.json"


@dataclass(frozen=True, kw_only=True)
class Net(ModelSpec):
    """An unmodified model, the functions that call it, and the facts about it for the report.

    The attacked space is pixels in [0, 1] for images (normalisation happens inside), the tensor
    itself for float tokens, and the output of the token embedding for text. The module is in eval
    mode, and its parameters are frozen.

    Attributes: those of `ModelSpec`, and
        name: the MODEL argument as typed.
        source: source of the model: demo, timm, hf, file or py; or `OWN`.
        call: runs the module on (x, mask); for images it normalises first.
        read: returns the output tensor from the result of `call`: (batch, classes) logits or
            (batch, ...) features.
        parameters: number of parameters.
        weights_sha256: hash over the sorted (name, dtype, shape, bytes) of the state dict.
        classes: number of classes of a classifier, else None.
        device_map: placement of the weights by module name, if requested.
        scored: the kind of its classes if they are scored continuations, else empty. A sample is
            then a prompt with continuations, packed by `data.continuations.pack`, and only the
            prompt can change.
        form: what the module itself returns for each class. `read` returns logits of every form:
            for probabilities p, log p.
        undefined: whether its output was not finite on the samples that loading makes: the first
            sample of the run decides (see `outputs.complete_form`).
        tokens_first: whether the output of `entry` is (tokens, batch, width), as with `ids.T`.
        exact: the model without rounding, whose gradients a model under autocast takes; see
            `deploy`.
        surveys: results of `attention.survey.find_layers` on this model; a changed copy starts
            without any.
    """

    name: str
    source: str
    call: Call
    read: Read
    parameters: int
    weights_sha256: str
    classes: int | None
    device_map: Mapping[str, str] = field(default_factory=dict)
    scored: Literal["", "continuation", "choices", "labels"] = ""
    form: OutputForm = "logits"
    undefined: bool = False
    tokens_first: bool = False
    exact: Net | None = field(default=None, repr=False, compare=False)
    surveys: list[Any] = field(init=False, default_factory=list, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Return the device of samples: that of the first parameter when the model reads it."""
        return next(list_devices(self.module))

    @property
    def dtype(self) -> torch.dtype:
        """Return the floating-point dtype in which the model reads its parameters."""
        return find_dtype(self.module)

    @property
    def patch(self) -> tuple[int, int] | None:
        """Height and width of the patches into which the model divides an image, if known.

        Patches come from a convolution of the image whose stride is as large as its kernel.
        """
        if self.kind != "image":
            return None
        for part in self.module.modules():
            if not isinstance(part, nn.Conv2d) or part.in_channels != self.input_shape[0]:
                continue
            if part.stride == part.kernel_size != (1, 1):
                height, width = part.kernel_size
                return height, width
        return None

    @property
    def changes(self) -> tuple[Norm, ...]:
        """Return the ways in which attacks can change texts for this model; none for other kinds.

        Ways are words, characters and a suffix.
        """
        # Attacks choose tokens by the gradient at the embedding table.
        table = getattr(self.entry, "weight", None)
        if self.kind != "text" or not isinstance(table, Tensor) or table.ndim != 2:
            return ()
        if self.lexicon is not None:
            return ("words", "characters", "suffix")
        # A tokenizer without a lexicon reads texts, but a changed text could not be written.
        if self.tokenize is not None:
            return ()
        return ("words",)  # inputs are token ids

    @property
    def lacks_classes(self) -> str:
        """Return why the model has no accuracy."""
        reasons = (note.text for note in self.notes if note.code == NO_DECISION)
        return next(reasons, f"{self.architecture} has no class scores")

    def deploy(self, autocast: str) -> Net:
        """Return this model as it runs under `torch.autocast`, for attacks.

        Outputs are those under autocast: they decide whether an attack breaks a prediction.
        Gradients are those of this model, without rounding. Under autocast, rounding to 8 or 11
        bits would hide small steps, and gradients would underflow.

        Args:
            autocast: bfloat16 or float16.
        """
        # `run` returns the output itself, so `read` of the new model has nothing to do.
        run = deploy(lambda x, mask: self.read(self.call(x, mask)), self.device, autocast)
        return replace(self, call=run, read=lambda output: output, exact=self)

    def output(self, batch: Batch) -> Tensor:
        """Run the model on a batch: logits or features, (batch, ...)."""
        return self.read(self.call(batch.x, batch.mask))

    def point(self, batch: Batch) -> Tensor:
        """Return the point of each sample in the attacked space (detached)."""
        if self.kind == "text":
            return self.embedding(batch)
        return batch.x.detach()

    def find_free_tokens(self, batch: Batch) -> Tensor | None:
        """Return a mask of the tokens that an attack may change, (batch, tokens); None: all.

        In images and float tokens, everything may change. In texts, padding may not change. In
        prompts with continuations to score, only the tokens of the prompt may change.
        """
        if not self.scored:  # the samples are no prompts with continuations
            return batch.mask if self.kind == "text" else None
        # Prompt and continuations are one row of ids. To mark a token of continuation number i,
        # `data.continuations.pack` adds i times the size of the vocabulary to its id. So ids below
        # this size belong to the prompt.
        in_prompt = batch.x < (self.vocabulary or 0)
        if batch.mask is None:
            return in_prompt
        return in_prompt & batch.mask

    def forward(self, z: Tensor, batch: Batch) -> Tensor:
        """Run the model on points of the attacked space: pixels, floats, or embeddings of texts.

        Args:
            z: a point for each sample. For texts, the points replace the output of the embedding
                module, and the model still gets the ids.
            batch: the samples, whose masks (and ids) are used.
        """
        needs_gradient = torch.is_grad_enabled() and z.requires_grad
        if self.exact is None or not needs_gradient:
            return self._run(z, batch)
        # A model under autocast: the output is computed with rounding, and its gradient by the
        # model `exact`, without rounding.
        with torch.no_grad():
            deployed = self._run(z, batch)
        return borrow_gradient(deployed, self.exact.forward(z, batch))

    def _run(self, z: Tensor, batch: Batch) -> Tensor:
        """Return the output at points z of the attacked space, as a function of z for autograd."""
        if self.kind != "text":
            return self.read(self.call(z, batch.mask))
        # The model runs on the ids of the texts, and z takes the place of their embeddings.
        with self.replace_embedding(z):
            return self.output(batch)

    def make_classifier(self, batch: Batch) -> Classifier | ByRow:
        """Return the model as an attack calls it: a function from points z near a batch to scores.

        An attack may call it with points of some samples only. A text has its own mask. So for
        texts the function also takes the rows of the batch to which the points belong (`ByRow`).
        """
        if self.kind == "text":
            return ByRow(lambda z, rows: self.forward(z, batch.rows_without_ids(rows)))
        return lambda z: self.forward(z, batch)

    def embedding(self, batch: Batch) -> Tensor:
        """Return the output of the embedding module on a batch, with samples first (detached)."""
        outputs = []
        # The hook copies the output, because some models scale their embeddings in place.
        with torch.no_grad(), self._watch_entry(lambda out: outputs.append(out.clone())):
            self.call(batch.x, batch.mask)
        states = self._put_batch_first(outputs[0])
        if self.exact is None:  # not under autocast
            return states
        return states.to(self.dtype)  # autocast may have returned half precision

    def replace_embedding(self, z: Tensor) -> RemovableHandle:
        """Replace the next output of the embedding module by z, until the handle is removed.

        Use the handle in a `with` statement, which removes it.
        """
        # z is (batch, tokens, width). Some models embed as (tokens, batch, width). For these,
        # `_put_batch_first` exchanges the two axes, also in this direction.
        # The first call of the embedding module takes z from this list, and leaves it empty.
        pending = [self._put_batch_first(z).clone()]

        def replace_first(out: Tensor) -> Tensor:
            """Return z for the first output of the embedding module, and later outputs as is."""
            if not pending:  # a later call of the same embedding, such as by the decoder
                return out
            # Cast z to the dtype of the embedding: under autocast this may be half precision.
            return pending.pop().to(out.dtype)

        return self._watch_entry(replace_first)

    def _put_batch_first(self, states: Tensor) -> Tensor:
        """Return embeddings as (batch, tokens, width) if the model has (tokens, batch, width)."""
        if self.tokens_first:
            return states.transpose(0, 1)
        return states

    def _watch_entry(self, change: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Pass each output of the embedding module through `change`; None keeps the output."""
        if self.entry is None:
            raise ValueError("this model has no known embedding module")
        return self.entry.register_forward_hook(lambda _module, _args, out: change(out))
