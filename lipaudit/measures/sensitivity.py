"""Norms, margins and directions of the Jacobians of some samples, for the measure `jacobian`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, join_few
from lipaudit.measures import drawings
from lipaudit.measures.base import Arrays, Facts
from lipaudit.measures.layers import choose_layers
from lipaudit.measures.shares import measure_shares
from lipaudit.models.attention.capture import Site
from lipaudit.models.attention.numeric import (
    Residual,
    find_residuals,
    record_outputs,
    start_after,
)
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.endpoints import (
    SampleFunction,
    find_places,
    make_sample_function,
    resolve_target,
)
from lipaudit.models.linearize import Linearization, linearize
from lipaudit.models.model_norms import JacobianNorms, compute_jacobian_norms, compute_margins
from lipaudit.models.net import Net
from lipaudit.tables import Note, Notes
from lipaudit.tables.columns import group_values
from lipaudit.tables.trials import Target, find_layer

if TYPE_CHECKING:
    from lipaudit.measures.jacobian import JacobianOptions

# Columns of every norm, with their types.
OF_NORMS = {"norm": float, "upper": float, "within": float, "products": int, "converged": bool}
# Why a layer has no norm of its own.
NO_BLOCK = "no block around {} has a residual connection"
NO_ROWS = "the output of the block around {} has no row per sample"


class Blocks(NamedTuple):
    """Blocks that have norms of their own.

    Attributes:
        starts: for --from, those whose output is an input of the Jacobian, by its name: `layer:5`.
        inner: for --per-layer, those that are differentiated themselves, from their input to their
            output.
        notes: remarks on layers without a block.
    """

    starts: dict[str, Residual]
    inner: tuple[Residual, ...]
    notes: Notes


def find_blocks(net: Net, batch: Batch, options: JacobianOptions) -> Blocks:
    """Find the residual blocks that --from and --per-layer ask for, by running one sample.

    Raises:
        InputError: no layer of --from has a block whose output has a row per sample.
    """
    layer = find_layer(options.start)  # 5 of --from layer:5; None of --from layers and others
    from_layers = layer is not None or options.start == "layers"
    if not (from_layers or options.per_layer):
        return Blocks(starts={}, inner=(), notes=())
    sites = find_layers(net, batch)
    chosen = choose_layers(sites, None if layer is None else (layer,))
    # For --per-layer: the smallest module with a skip path around the attention of each layer,
    # which may leave the MLP out.
    smallest_blocks = find_residuals(net, batch, sites)
    blocks = smallest_blocks
    starts = dict[str, Residual]()
    if from_layers:
        # The entire block, with its MLP: its output is the residual stream after the layer.
        blocks = find_residuals(net, batch, sites, entire=True)
        starts = _find_starts(chosen, blocks)
    reasons = _explain_missing(chosen, blocks)
    if from_layers and not starts:
        raise InputError(
            f"{net.architecture}: {'; '.join(reasons)}", "Use another --from, such as embeddings."
        )
    inner: tuple[Residual, ...] = ()
    if options.per_layer:
        # The blocks of all layers: --from layer:5 chooses an input, not the layers to measure.
        # Layers may be in the same block: each block once.
        blocks_with_rows = (block for block in smallest_blocks if block and block.by_sample)
        inner = tuple(dict.fromkeys(blocks_with_rows))
    return Blocks(starts, inner, tuple(Note.info("no-block", reason) for reason in reasons))


def _find_starts(sites: Sequence[Site], blocks: Sequence[Residual | None]) -> dict[str, Residual]:
    """Return {"layer:5": the residual block around attention layer 5}, for each of some layers.

    Left out are layers without a block, and blocks whose output has no row per sample. Several
    attention layers in one block share its output, which is named after the first of these layers.

    Args:
        sites: some attention layers.
        blocks: the block around every attention layer of the model; None if it has none.
    """
    outputs: dict[str, Residual] = {}
    for site in sites:
        block = blocks[site.index]
        if block and block.by_sample and block not in outputs.values():
            outputs[f"layer:{site.index}"] = block
    return outputs


def _explain_missing(sites: Sequence[Site], blocks: Sequence[Residual | None]) -> list[str]:
    """Return sentences on the attention layers that have no block with a norm, one per reason.

    Args:
        sites: some attention layers.
        blocks: the block around every attention layer of the model; None if it has none.
    """
    reasons_of_layers = []
    for site in sites:
        block = blocks[site.index]
        if block is None:
            reasons_of_layers.append((NO_BLOCK, site.index))
        elif not block.by_sample:  # rows of the block's output are tokens or windows
            reasons_of_layers.append((NO_ROWS, site.index))
    reasons = []
    for reason, layers in group_values(reasons_of_layers).items():
        plural = "s" * (len(layers) > 1)
        reasons.append(reason.format(f"attention layer{plural} {join_few(layers)}"))
    return reasons


def find_position(net: Net, batch: Batch, end: Target) -> Tensor | None:
    """Return the column of the token in each text at which --to reads the output, (samples,).

    -1 if a text is too short for the position. None if --to names no position.
    """
    # The loss predicts each next token. It has no position, but a text needs a second token: -1
    # says that it has none. Any other column is not read (see `make_sample_function`).
    if end.what == "loss" and net.classes is None:
        return find_places(batch, "1")
    if end.where:
        return find_places(batch, end.where)
    return None


class _BlockGraph:
    """The graph of one forward pass, which gives the Jacobian from the input and from each block.

    Attributes:
        whole: the map from the input to the output.
        bypassed: names of the blocks that other paths from the input go around.
    """

    def __init__(self, net: Net, at: SampleFunction, blocks: Mapping[str, Residual]) -> None:
        """Run the model once on all samples, and keep its graph.

        Args:
            net: the model.
            at: the function from input to output, and the samples as its points.
            blocks: blocks at whose output a Jacobian may begin, by name: `layer:5`.
        """
        self.net = net
        self.at = at
        self.blocks = blocks
        # `outputs`: the output of each block in this pass, as a tensor inside the graph.
        f, self.outputs = record_outputs(net, tuple(blocks.values()), at.f)
        self.whole = linearize(f, at.x)  # the Jacobian from the input of the model
        # Blocks around which the input also reaches the output; `linearize_after` adds them.
        self.bypassed: list[str] = []

    def linearize_after(self, name: str) -> Linearization:
        """Return the map from the output of a block to the output of the model.

        If the input of the model also reaches the output by paths around the block, the name of
        the block is added to `bypassed`.

        Args:
            name: the name of the block, such as `layer:5`.

        Raises:
            InputError: the output does not depend on the block, or the block's output has no row
                per sample.
        """
        block = self.blocks[name]
        block_output = self.outputs[block]
        depends_on_block, has_other_paths = self.whole.find_paths(block_output)
        if not depends_on_block:
            text = f"the output {self.at.target} of {self.net.architecture} does not depend on "
            raise InputError(f"{text}{name} ({block.module})", "Use another --to or --from.")
        if len(block_output) != len(self.at.x):
            raise InputError(NO_ROWS.format(name), "Use another --from.")
        if has_other_paths:
            self.bypassed.append(name)
        # The same map as a function, in case the graph has to be built again.
        f = start_after(self.net, block, self.at.f, self.at.x)
        return self.whole.start_at(f, block_output)


class Sensitivity(NamedTuple):
    """The figures of some samples.

    Attributes:
        values: norms and margins, (samples, ...).
        facts: names of input and output, gradients by token, and more.
        of_blocks: norms from the output of each block.
    """

    values: Arrays
    facts: Facts
    of_blocks: list[JacobianNorms]


def measure_batch(
    net: Net,
    batch: Batch,
    options: JacobianOptions,
    starts: Mapping[str, Residual],
    first: Batch,
) -> Sensitivity:
    """Return norms of the Jacobian at some samples, their loss or margins, and shares of heads.

    Args:
        net: the model.
        batch: the samples; all texts have one length, so a position is the same column in all.
        options: the options.
        starts: blocks at whose output the Jacobian may begin, by name: `layer:5`.
        first: the first sample of the run; the attention layers are found by running it.
    """
    end = resolve_target(net, batch, options.target)
    position = find_position(net, batch, end)
    at = make_sample_function(net, batch, start=options.start, target=end.text, place=position)
    settings: dict[str, Any] = {
        **options.accuracy,
        "norm": options.norm,
        "seeds": options.list_seeds(batch.ids),
    }
    # 1. Norms. All figures are those of `linear`, the Jacobian at each sample.
    graph = _BlockGraph(net, at, starts)
    linear = graph.whole  # from the input of the model
    start = at.start
    of_blocks = []
    ends = []  # of each norm of a block: input, output, module of the block, method
    if options.start in starts:  # --from layer:5: from the output of a block
        start = str(options.start)
        linear = graph.linearize_after(start)
    else:  # --from layers: norms from the outputs of blocks, in addition
        for name, block in starts.items():
            of_block = compute_jacobian_norms(graph.linearize_after(name), **settings)
            of_blocks.append(of_block)
            ends.append((name, at.target, block.module, of_block.method))
    # Margins f_y - f_j between classes need at least two logits, (samples, classes).
    has_margins = end.what == "logits" and linear.output.ndim == 2 and linear.output.shape[1] > 1
    norms = compute_jacobian_norms(
        linear,
        # The input direction v with the largest |J v| / |v| is needed for a drawing of tokens
        # only. Images have no such drawing. With margins, the drawing shows the gradients of the
        # margins instead.
        directions=net.kind != "image" and options.norm == "2" and not has_margins,
        # The left singular vector is the direction of the output in which shares are measured.
        left=options.shares and options.direction != "margin",
        **settings,
    )
    values = {name: getattr(norms, name).numpy().astype(kind) for name, kind in OF_NORMS.items()}
    facts: Facts = {
        "from": start,
        "to": at.target,
        "method": norms.method,
        # Names of the blocks around which the input also reaches the output.
        "around": graph.bypassed,
        "ends": ends,
    }
    # 2. The loss, or the margins between classes, and the gradients that a page draws.
    labels = None if net.classes is None else batch.y
    if end.what == "loss":
        values["loss"] = linear.output[:, 0].double().cpu().numpy()
        # Number of samples without a label, whose loss is that of the predicted class.
        facts["unlabelled"] = 0 if net.classes is None else _count_unlabelled(batch)
    gradient = norms.vector  # v, (samples, inputs)
    drawn = "direction"
    if has_margins:
        margins, gradient = _measure_margins(linear, labels, upper=norms.upper, options=options)
        values |= margins
        drawn = "margin"
    if gradient is not None and net.kind != "image":
        gradient = gradient.view_as(linear.x)
        facts["gradients"] = drawings.describe_gradients(net, batch, gradient, of=drawn)
    # 3. The shares of heads and blocks in the change of the output along some directions.
    if options.shares:
        shares, facts_of_shares = _measure_head_shares(graph, batch, norms, labels, first)
        values |= shares
        facts |= facts_of_shares
    return Sensitivity(values, facts, of_blocks)


def _measure_head_shares(
    graph: _BlockGraph, batch: Batch, norms: JacobianNorms, labels: Tensor | None, first: Batch
) -> tuple[Arrays, Facts]:
    """Return the shares of heads and blocks in the change of the output, and facts on them.

    This frees the graph, as shares build a second one.

    Args:
        graph: the graph from the input of the model to its output.
        batch: the samples.
        norms: the Jacobian norms, with the singular vectors along which shares are measured.
        labels: true classes; -1: the sample has no label. None: no sample has one.
        first: the first sample of the run; the attention layers are found by running it.
    """
    values = {}
    if norms.gap is not None:
        values["gap"] = norms.gap.numpy()
    directions, counted = _find_directions(norms, graph.whole, labels)
    graph.whole.release()
    shares, facts = measure_shares(graph.net, batch, graph.at, directions, counted, first)
    return values | shares, facts


def _count_unlabelled(batch: Batch) -> int:
    """Return the number of samples without a label."""
    if batch.y is None:
        return len(batch)
    return int((batch.y < 0).sum())


def _find_directions(
    norms: JacobianNorms, linear: Linearization, labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output directions along which shares of heads are measured, at each sample.

    By default these are the leading left singular vectors of the Jacobian. Without them
    (--direction margin), it is the direction of the margin f_y - f_j between the class y and the
    next best class j.

    Returns:
        The directions, (samples, directions, outputs), and which of them count, (samples,
        directions). The share of a head at a sample is the mean over the directions that count:
        vectors whose singular value equals the largest one up to tol.
    """
    if norms.left is not None and norms.tied is not None:
        return norms.left, norms.tied
    logits = linear.output
    y = logits.argmax(1)
    if labels is not None:  # the predicted class stands in for a missing label (-1)
        y = torch.where(labels < 0, y, labels.to(y))
    # The next best class: y itself cannot win once its logit is -inf.
    j = logits.scatter(1, y[:, None], -torch.inf).argmax(1)
    # The derivative of f_y - f_j by the logits: e_y - e_j, (samples, classes).
    classes = logits.shape[1]
    direction = F.one_hot(y, classes) - F.one_hot(j, classes)
    return direction[:, None].to(logits), torch.ones(len(logits), 1, dtype=torch.bool)


def _measure_margins(
    linear: Linearization, labels: Tensor | None, upper: Tensor, options: JacobianOptions
) -> tuple[Arrays, Tensor | None]:
    """Return margins and first-order radii per sample, and the gradients of the margins.

    The margin of a sample of class y is f_y - f_j, with the logits f and the next best class j.
    Without a label, y is the predicted class. The gradient, (samples, inputs), is the direction in
    which the margin changes most.

    `complete` says of which samples the radius is that of the nearest class. For the other samples
    --rivals ended the search before all classes were examined, and the radius is a lower limit.

    Args:
        linear: the Jacobian from the input to the logits, at each sample.
        labels: true classes; -1: the sample has no label. None: no sample has one.
        upper: an upper limit of the norm of each Jacobian; it rules out classes that are too far.
        options: the options.
    """
    predicted = linear.output.argmax(1)
    # A label of -1 stays in y: `compute_margins` takes the predicted class in its place.
    y = predicted if labels is None else labels
    margins = compute_margins(linear, y, rivals=options.rivals, norm=options.norm, upper=upper)
    # A sample without a label counts as right, as its class is the predicted one. A wrong sample
    # has no radius: it is NaN.
    right = ((y < 0) | (predicted == y)).cpu()
    values = {
        "margin": margins.margin.numpy(),
        "radius_first_order": margins.radius.masked_fill(~right, torch.nan).numpy(),
        "rivals": margins.rivals.numpy(),
        "complete": margins.complete.numpy(),
    }
    if labels is not None and bool((labels >= 0).any()):
        values["correct"] = right.numpy()
    return values, margins.direction
