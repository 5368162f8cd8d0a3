"""Read the attention of any transformer: one pass over the unmodified model, layer by layer.

`survey` (in `lipaudit.models.attention.survey`) finds out once what each layer is.
`capture` then runs the model on a batch and hands over each layer as it is met, with the tensors
of one alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, StructureError
from lipaudit.models.attention.observe.events import AttentionCall
from lipaudit.models.attention.observe.trace import Address, Frame, Tracer, undisturbed
from lipaudit.models.attention.project.structure import NotClosedForm
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.to_heads import assemble, canonical, distribution, product
from lipaudit.models.generic import token_embeddings
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.heads import Heads


@dataclass(frozen=True)
class Layer:
    """One attention layer on a batch; valid while its visit lasts.

    Attributes:
        site: which one.
        attention: its P, for every kind of layer, without X and projections. Where the model
            writes its softmax out, q, k and v are empty and `bias` holds the captured logits.
        output: O of every head, (windows, heads, tokens, d_v).
        samples: number of samples in the batch.
        frame: the module call that it is part of (`site.scope`); None where that is not known.
        number: which attention call of that module call it is.
        project: builds `heads()`.
    """

    site: Site
    attention: Heads
    output: Tensor
    samples: int
    frame: Frame | None
    number: int
    project: Callable[[], Heads]

    def heads(self) -> Heads:
        """Return the layer with X and its projections: what the closed form takes.

        Raises:
            ValueError: `site.closed_form` is False.
            StructureError: the layer is not what it was when the model was surveyed.
        """
        if not self.site.closed_form:
            raise ValueError(f"layer {self.site.index} has no closed form: {self.site.reason}")
        try:
            return self.project()
        except NotClosedForm as found:
            raise StructureError(self.site.index, self.site.module, found.reason) from found


Visit = Callable[[Layer], None]


def capture(
    net: Net,
    sites: Sequence[Site],
    batch: Batch,
    visit: Visit,
    *,
    layers: Collection[int] | None = None,
    projections: bool = True,
) -> Tensor:
    """Run the unmodified model on a batch and visit its attention layers in call order.

    Args:
        net: the model.
        sites: its layers, from `survey`.
        batch: the samples.
        visit: called with each selected layer while the model runs; what it does not keep is
            freed before the next one.
        layers: indices of the layers to visit; None for all.
        projections: whether visits call `Layer.heads`; the pass is cheaper where none does.

    Returns:
        The model's output, (batch, ...).

    Raises:
        EvaluationError: a selected layer was not met.
    """
    chosen = {site.address: site for site in sites if layers is None or site.index in layers}
    read = [s for s in sites if s.explicit or (projections and s.address in chosen)]

    def meet(call: AttentionCall, address: Address) -> None:
        site = chosen.pop(address, None)
        if site is not None:
            with torch.no_grad():
                visit(observe(site, call, batch, tracer.place.frames))

    tracer = Tracer(meet, wanted=frozenset().union(*(site.sources for site in read)))
    with undisturbed(net.module), exact_arithmetic(net.device):
        output = run(net, batch, tracer)
    if chosen:
        missing = next(iter(chosen.values()))
        raise EvaluationError(
            f"attention layer {missing.index} ({missing.module}) was not met on this batch",
            "the model chooses its layers by the data: leave this one out with --layers",
        )
    return output


def run(net: Net, batch: Batch, tracer: Tracer) -> Tensor:
    """Run the model under observation and return its output."""
    with tracer.watching(net.module), _entered(net, tracer):
        x = batch.x if net.kind == "text" else tracer.input(batch.x)
        return net.read(net.call(x, batch.mask)).detach()


def observe(site: Site, call: AttentionCall, batch: Batch, frames: Sequence[Frame]) -> Layer:
    """Return the layer that a call is, while the model is inside the given module calls."""
    structure = site.structure
    rows = structure.q.rows if structure is not None and structure.q is not None else None
    attention = distribution(call, site.layout, batch, rows)
    with torch.enable_grad():
        arranged = canonical(call, site.layout, len(batch))

    def project() -> Heads:
        assert structure is not None
        with torch.enable_grad():
            whole, relative = product(call, site.layout, batch, rows)
            return assemble(structure, whole, arranged, batch, relative)[0]

    frame = next((f for f in reversed(frames) if f.name == site.scope), None)
    number = 0 if frame is None else frame.attentions
    return Layer(site, attention, arranged.output.detach(), len(batch), frame, number, project)


@contextmanager
def _entered(net: Net, tracer: Tracer) -> Iterator[None]:
    """Cut a text model at its token embedding and at every module that shares its weight."""
    with ExitStack() as hooks:
        for module in token_embeddings(net):
            hook = module.register_forward_hook(lambda _module, _args, out: tracer.input(out))
            hooks.callback(hook.remove)
        yield
