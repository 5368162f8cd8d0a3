"""Analyse each attention layer of a model once, and check the analysis before any number.

Layers are analysed at generic points: inputs at which nothing is equal, zero or constant by
accident. On a black image all tokens are equal: a normalisation of queries looks affine, heads
look repeated, two inputs look like one, and mixing of samples stays invisible.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import (
    EvaluationError,
    InputError,
    LipauditError,
    is_machine_error,
    is_ours,
    join_few,
    summarise_error,
)
from lipaudit.models import requirements
from lipaudit.models.attention import calls, trace
from lipaudit.models.attention.capture import Site
from lipaudit.models.attention.loops import find_loops, note_partners
from lipaudit.models.attention.surveyor import Surveyor
from lipaudit.models.attention.uses import Uses
from lipaudit.models.graph import count_writes
from lipaudit.models.net import Net
from lipaudit.models.precision import compute_values, exact_arithmetic, widen_casts
from lipaudit.models.requirements import agree


def find_layers(net: Net, batch: Batch) -> tuple[Site, ...]:
    """Return the attention layers of a model, from an earlier survey if it still holds.

    A model is surveyed again
    - when its weights have been written to;
    - at a sample of another shape, if some layer has no closed form: it may have one there;
    - at a sample of another shape, if the model makes other attention calls there. One forward
      pass shows this.
    In all other cases, each batch compares every closed form with the survey.

    Raises:
        InputError, EvaluationError: as in `survey`.
    """
    sample = _take_sample(net, batch)
    if net.surveys:  # forget surveys of other weights
        weights = _fingerprint_weights(net.module)
        net.surveys[:] = [earlier for earlier in net.surveys if earlier.weights == weights]
    # `holds` runs the model, so it is asked only for a new shape.
    fitting = (s for s in net.surveys if sample.shape in s.shapes or s.holds(net, batch))
    result: Survey | None = next(fitting, None)
    if result is None:
        result = survey(net, batch)
        net.surveys.append(result)
    result.shapes.add(sample.shape)
    return result.sites


class NoHeadsError(InputError):
    """The model has no readable attention; other measures need none."""


@dataclass(frozen=True)
class Survey:
    """The attention layers of a model, and the conditions under which they are known.

    Attributes:
        sites: the layers.
        unread: modules, with lines of code, whose attention is not among the layers.
        weights: fingerprint of the weights.
        scores: products of keys and learned queries that are no linear maps.
        shapes: shapes of samples for which the survey holds, as `find_layers` has found.
    """

    sites: tuple[Site, ...]
    unread: tuple[str, ...]
    weights: Hashable
    scores: frozenset[calls.Address]
    shapes: set[torch.Size] = field(default_factory=set)

    def holds(self, net: Net, batch: Batch) -> bool:
        """Say whether the survey holds for samples of another shape, by one forward pass.

        The survey holds if all layers have a closed form and the model makes the same attention
        calls on such samples.
        """
        # A layer without closed form may have one at this shape. Only a new survey finds it.
        if not all(site.closed_form for site in self.sites):
            return False
        # Run the model on two generic samples of this shape, and list its attention calls. The
        # graph is not cut at `scores`, products of keys and learned queries that look like linear
        # maps.
        addresses: list[calls.Address] = []
        net, pair, _ = make_generic(net, batch)
        loops = [site.loop for site in self.sites]
        tracer = trace.Tracer(
            lambda _, address: addresses.append(address), uncut_maps=self.scores, loops=loops
        )
        with trace.fork_random(net), exact_arithmetic(net.device):
            trace.run(net, pair, tracer)
        return addresses == [site.address for site in self.sites]


def _fingerprint_weights(module: nn.Module) -> Hashable:
    """Return a fingerprint that changes if a weight is replaced, moved or written to.

    It includes a sum of the values of each weight, because a write to `p.data` does not change the
    version counter of p.
    """
    fingerprint = []
    for p in chain(module.parameters(), module.buffers()):
        total = compute_values(p).detach().sum()  # also of a weight that is computed when used
        fingerprint.append((p.data_ptr(), count_writes(p), total.item()))
    return tuple(fingerprint)


def survey(net: Net, batch: Batch) -> Survey:
    """Analyse every attention layer of a model, and check the analysis.

    Layers are analysed at two generic points near a sample (see `make_generic`), never at the
    data: on a black image everything looks affine. Checks: two passes give the same output, a
    sample does not depend on its companion, observing the model does not change its output, and in
    every closed-form layer J^T u agrees to 1e-4 with autograd through the model's own attention,
    for one random u. A layer that fails or cannot be read has no closed form, with a reason.

    Raises:
        InputError: there is no attention, or none that can be read, or the model is random, mixes
            samples, changes when it is observed, or fails then.
        EvaluationError: the output is not finite.
    """
    # Two batches of two samples: a generic sample beside one companion (`pair`), and the same
    # sample beside another companion (`other`).
    net, pair, other = make_generic(net, batch)
    call_stack = trace.CallStack()
    uses = Uses(call_stack.module)
    try:
        with trace.fork_random(net), exact_arithmetic(net.device):
            output = _run_unobserved(net, pair, uses, call_stack)
            try:
                sites, scores = _observe_passes(net, pair, other, output, uses)
            except Exception as error:
                if is_machine_error(error):
                    raise
                # If the model is random or mixes samples, report that in place of this error.
                requirements.require_repeat(net, pair, other, output)
                raise
    except Exception as error:  # the model's own code may raise anything
        if isinstance(error, LipauditError) or is_machine_error(error) or is_ours(error):
            raise
        reason = summarise_error(error)
        raise InputError(
            f"{net.architecture} fails while lipaudit records its operations ({reason})",
            "Replace it. lipaudit attack and lipaudit jacobian from the input record none.",
        ) from error
    # Modules with more attention than the layers that were found. `uses` counts products of two
    # activations, so attention of learned queries (constants) is not in its count.
    counted = chain(*(site.addresses for site in sites if not site.learned))
    unread = uses.list_unread(address.module for address in counted)
    # The fingerprint comes last: a model may fill buffers in its first pass.
    return Survey(sites, tuple(unread), _fingerprint_weights(net.module), scores)


def _run_unobserved(net: Net, pair: Batch, uses: Uses, call_stack: trace.CallStack) -> Tensor:
    """Return the output of the model, run as it is, and count the uses of attention in it.

    `uses` marks the input, and every tensor that is computed from a marked one. So it finds all
    products of two tensors that depend on the sample, in any code: q k^T, and P v.

    Args:
        net: the model.
        pair: two samples.
        uses: counts products of attention, however they are computed, in each module.
        call_stack: follows the module calls, so that `uses` knows the running module.

    Raises:
        InputError: the output does not have a row per sample.
        EvaluationError: the output is not finite.
    """
    # Marks start at the pixels or, for a text, at the output of the token embedding.
    if net.kind != "text":
        uses.mark(pair.x)
    watched = trace.watch_embeddings(net, uses.mark)
    wide = widen_casts(net.dtype)  # as in the observed passes
    with watched, call_stack.following(net.module), uses, torch.no_grad(), wide:
        output = net.output(pair)
    if output.shape[:1] != (len(pair),):
        raise InputError(
            f"{len(pair)} samples give an output of shape {tuple(output.shape)}, so the model "
            "merges the samples of a batch",
            "Write a py: factory that returns a ModelSpec whose `call` gives one row per sample.",
        )
    if not output.isfinite().all():
        raise EvaluationError(
            "the model's output is not finite",
            "Check the weights, and try --dtype float64.",
        )
    return output


def _observe_passes(
    net: Net, pair: Batch, other: Batch, output: Tensor, uses: Uses
) -> tuple[tuple[Site, ...], frozenset[calls.Address]]:
    """Find the attention layers of a model in observed forward passes, which must not change it.

    A pass records the attention calls, and cuts the autograd graph at linear maps: q, k and v are
    then functions of the outputs of the last maps before them. One pass is enough for most models.
    Further ones join calls that compute one head each, cut the graph at fewer linear maps to read
    more layers, and check that a sample does not depend on the other one (its companion).

    Args:
        net: the model.
        pair: a sample and a companion.
        other: the same sample and another companion.
        output: the output on `pair` in an unobserved pass.
        uses: the uses of attention in that pass.

    Returns:
        The layers, and the products of keys with learned queries, at which no pass may cut.
    """

    def observe(loops: Sequence[calls.Loop], uncut_maps: frozenset[calls.Address]) -> Surveyor:
        """Run the model once to find its attention layers, and check that its output is unchanged.

        Args:
            loops: attention calls to join: the calls of each loop form one layer.
            uncut_maps: linear maps at which the pass does not cut the autograd graph. At all other
                maps it does, and q, k and v start at the cuts.
        """
        surveyor = Surveyor(pair, uncut_maps, loops)
        observed = trace.run(net, pair, surveyor)
        _require_unchanged(net, pair, output, observed)
        # `scores` are products of keys and learned queries: a further pass finds their layers.
        if not surveyor.layers and not surveyor.scores:
            raise _make_heads_error(net, uses)
        return surveyor

    surveyor = observe(loops=(), uncut_maps=frozenset())
    # A product of keys and learned queries (constants) looks like a linear map of the keys. Do not
    # cut the graph there, so that the attention can be read.
    scores = frozenset(surveyor.scores)
    if scores:
        surveyor = observe(loops=(), uncut_maps=scores)
    # Calls that compute one head, or one chunk of queries: run again, with these calls joined.
    loops = find_loops(surveyor.layers.values())
    if loops:
        surveyor = observe(loops, uncut_maps=scores)
    # Keys that are made from a latent of the tokens (MLA): run again, without a cut at the latent,
    # and take over the layers that have a closed form only then.
    if surveyor.next_uncut:
        surveyor.adopt(observe(loops, uncut_maps=scores | surveyor.next_uncut))
    _run_with_other_companion(net, surveyor, other, output, loops)
    # Remove the calls of a model that attends to one sample after the other: some of them change
    # with the companion, and others do not. If both companions are equal (a text that reads the
    # same backwards), no call can change.
    if not torch.equal(pair.x, other.x):
        surveyor.leave_loops()
    if not surveyor.layers:
        raise _make_heads_error(net, uses)
    # Note the layers that are parts of one attention, for reports; refuse chunks of its queries.
    note_partners(surveyor.layers.values())
    return tuple(layer.site for layer in surveyor.layers.values()), scores


def _require_unchanged(net: Net, pair: Batch, output: Tensor, observed: Tensor) -> None:
    """Raise InputError if the output of an observed pass is not the output of the model as it is.

    Args:
        net: the model.
        pair: the samples.
        output: the output without an observer.
        observed: the output with an observer.
    """
    # Each sample (`each=0`) is compared on its own. A difference above the strict tolerance (1e-5)
    # may come from a random model: `require_repeat` runs the model again, and raises if so.
    if not agree(output, observed, each=0):
        requirements.require_repeat(net, pair, pair, output)
    # Otherwise it is an effect of the observer, and is allowed up to the looser tolerance (1e-4).
    if not agree(output, observed, tolerance=requirements.AGREES, each=0):
        difference = (observed - output).abs().amax()
        gap = difference / output.abs().amax()
        raise InputError(
            f"the model's output changes by {gap:.1e} (relative) when it is observed",
            "Use a model that does not depend on the autograd mode or on how it is called.",
        )


def _run_with_other_companion(
    net: Net, surveyor: Surveyor, other: Batch, output: Tensor, loops: Sequence[calls.Loop]
) -> None:
    """Run the same sample beside another companion, and refuse layers that mix samples.

    A layer mixes samples if its q, k or v change for the sample. The pass calls `surveyor.compare`
    at each attention, which refuses such a layer.

    Args:
        net: the model.
        surveyor: holds the layers, and q, k and v beside the first companion.
        other: the sample and the other companion.
        output: the output beside the first companion.
        loops: attention calls that form one layer.
    """
    # The pass needs no graphs, because it only compares values. But the tracer recognises a
    # written-out softmax by the graph from q or k to the softmax. So for such layers the graph is
    # cut at the linear maps behind q and k (`cut_at`), which makes their outputs leaves with
    # gradients.
    explicit = (layer.site for layer in surveyor.layers.values() if layer.site.explicit)
    sources = frozenset().union(*(site.sources for site in explicit))
    tracer = trace.Tracer(surveyor.compare, cut_at=sources, loops=loops)
    other_output = trace.run(net, other, tracer)
    # The sample's output must not depend on its companion. If it does, `require_repeat` finds out
    # whether the model is random or mixes samples, and raises the error that says so.
    if not agree(output[0], other_output[0]):
        requirements.require_repeat(net, surveyor.batch, other, output)


def _make_heads_error(net: Net, uses: Uses) -> NoHeadsError:
    """Return the error for a model in which no attention layer was found.

    Args:
        net: the model.
        uses: the uses of attention that were counted all the same.
    """
    name = net.architecture
    modules = uses.list_unread(())  # no layer is known: all modules that use attention
    unread = (
        f"no attention was recognised in {name}, and none can be measured ({join_few(modules)}): "
        "values are multiplied by a product of activations. Attention does so if its weights are "
        "not a softmax over keys, or are reshaped before they multiply the values. So does "
        "attention that is detached or computed sample by sample. State spaces (Mamba-2) and "
        "linear attention do, too"
    )
    absent = (
        f"no attention was found in {name}: neither scaled_dot_product_attention nor a "
        "softmax over q k^T was called"
    )
    return NoHeadsError(
        unread if modules else absent,
        "Flash and flex attention, torch.compile, TorchScript, detach, no_grad, vmap and loops "
        "over samples hide the softmax. Load the model uncompiled, with "
        "attn_implementation='sdpa' or 'eager', and leave these out. For a model "
        "without softmax attention (convolutions, linear attention), use `lipaudit jacobian` from "
        "the model's input or `lipaudit attack`, which need no heads.",
    )


FEWEST_TOKENS = 16  # with one token, a rotary position of 0 is no rotation
MOST_TOKENS = 1024  # long enough to show the structure, short enough: autograd keeps whole maps


def make_generic(net: Net, batch: Batch) -> tuple[Net, Batch, Batch]:
    """Return the model and two pairs of generic samples: one sample beside each of two companions.

    Generic means without equal, zero or constant parts, at which one function may look like
    another one. All samples come from the first sample of the batch (for texts: the longest) and
    seeded noise. If inputs have a range, a sample is the average of both, with noise in this
    range. Otherwise noise as large as the sample is added. Texts keep their token ids, and so
    their special tokens and masks; the returned model adds the noise to the embeddings.
    """
    x = _take_sample(net, batch)
    # The sample and its two companions. Pixels of all three get different noise. Texts get none
    # here, so the first companion is reversed: its order of tokens differs.
    samples = [x, x.flip(-1), x]
    if net.kind == "text":
        net = _add_embedding_noise(net)
    else:
        samples = [_add_noise(t, net.box, seed) for seed, t in enumerate(samples)]
    ids = (batch.ids[0], batch.ids[0] + "-companion")
    generic, first, second = samples
    pair = Batch(torch.cat([generic, first]), None, ids)
    other = Batch(torch.cat([generic, second]), None, ids)
    return net, pair, other


def _add_noise(t: Tensor, box: tuple[float, float] | None, seed: int) -> Tensor:
    """Return the average of t and uniform noise in the range of inputs.

    If no range is known (`box` is None), normal noise is added, in each token as large as the
    token (by the root mean square).
    """
    generator = torch.Generator().manual_seed(seed)
    if box is None:
        size = t.square().mean(-1, keepdim=True).sqrt()
        noise = torch.randn(t.shape, generator=generator).to(t)
        # A token of zeros gets noise of size 1, as it must not stay 0.
        return t + torch.where(size == 0, 1.0, size) * noise
    low, high = box
    share = torch.rand(t.shape, generator=generator).to(t)
    noise = low + (high - low) * share
    return 0.5 * (t + noise)


def _add_embedding_noise(net: Net) -> Net:
    """Return a text model that adds noise to its token embeddings, the same in each pass."""

    def call(x: Tensor, mask: Tensor | None) -> Any:
        """Run the model with noise on the output of each call of the embedding."""
        seeds = count()  # a model may embed several times in a pass (encoder and decoder)
        with trace.watch_embeddings(net, lambda out: _add_noise(out, box=None, seed=next(seeds))):
            return net.call(x, mask)

    return replace(net, call=call)


def _take_sample(net: Net, batch: Batch) -> Tensor:
    """Return the first sample of a batch, (1, *in); of texts, the longest one without padding.

    A short text is repeated to `FEWEST_TOKENS`, and a long one is cut to `MOST_TOKENS`.
    """
    if net.kind != "text":
        return batch.x[:1]
    ids = batch.x[0]
    if batch.mask is not None:
        longest = int(batch.mask.sum(1).argmax())
        ids = batch.x[longest, batch.mask[longest]]
    fewest = min(FEWEST_TOKENS, net.input_shape[0])  # the model may take fewer tokens
    length = max(len(ids), fewest)
    tokens = ids.repeat(math.ceil(length / len(ids)))
    return tokens[None, : min(length, MOST_TOKENS)]
