"""Run a model once, cut at its linear maps, with the address of each op."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.models.attention import calls
from lipaudit.models.attention.calls import (
    Address,
    Ancestors,
    AttentionCall,
    Linear,
    Loop,
    OnAttention,
    Origin,
    Origins,
    TorchFunction,
)
from lipaudit.models.attention.contractions import READERS, Contraction
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.graph import count_writes, divides_channels, is_affine, root, summarise_rows
from lipaudit.models.net import Net, watch_modules
from lipaudit.models.precision import refer_to_weight, widen_casts

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DEEPEST = 3  # largest number of linear maps in sequence between an input and q, k or v


@dataclass
class Frame:
    """A module call in progress, with its number among the calls of the module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    attentions: list[Address] = field(default_factory=list)

    @property
    def arguments(self) -> dict[Any, Any]:
        """Return all arguments, by position or keyword."""
        return dict(enumerate(self.args)) | self.kwargs

    @property
    def inputs(self) -> dict[int | str, Tensor]:
        """Return the arguments that depend on the model's input, by position or keyword."""
        arguments = self.arguments.items()
        # While the model runs, only tensors that depend on its input require gradients.
        return {k: t for k, t in arguments if isinstance(t, Tensor) and t.requires_grad}

    def name_inputs(self) -> list[str]:
        """Return the names of `inputs`; a tensor that is given twice is named `query = key`."""
        names_by_tensor: dict[int, list[str]] = {}
        for key, t in self.inputs.items():
            name = self._name_position(key) if isinstance(key, int) else key
            names_by_tensor.setdefault(id(t), []).append(name)
        return [" = ".join(names) for names in names_by_tensor.values()]

    def _name_position(self, position: int) -> str:
        """Return the name of a positional argument in the signature of `forward`."""
        names = []
        with suppress(TypeError, ValueError):  # compiled code may have no signature
            parameters = inspect.signature(self.module.forward).parameters.values()
            names = [p.name for p in parameters if p.kind in _POSITIONAL]
        if position < len(names):
            return names[position]
        return f"argument {position + 1}"

    def holds(self, module: str) -> bool:
        """Say whether a module, given by its path, is this frame's module or a part of it."""
        # The model itself has the empty path, and holds every module.
        return not self.name or f"{module}.".startswith(f"{self.name}.")


@dataclass
class CallStack:
    """The module calls in progress, and how many ops and calls each module has made so far.

    Attributes:
        on_enter: takes each module call at its start.
        on_leave: takes each module call and its output.
        frames: the module calls in progress, the innermost one last.
        counts: numbers of ops and calls so far, by module.
    """

    on_enter: Callable[[Frame], None] = lambda _: None
    on_leave: Callable[[Frame, Any], None] = lambda *_: None
    frames: list[Frame] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def address(self, op: str) -> Address:
        """Return the address of the next op of a kind, and count it.

        The address consists of the innermost module, the kind, and the number of the op there.
        """
        module = self.module()
        self.counts[module, op] += 1
        return Address(module, op, self.counts[module, op] - 1)

    def module(self) -> str:
        """Return the path of the innermost module."""
        if self.frames:
            return self.frames[-1].name
        return ""

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Keep `frames`, the module calls in progress, up to date inside the block, by hooks."""

        def enter(name: str, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            """Push the frame of a module call that begins."""
            frame = Frame(name, part, args, kwargs, number=self.counts[name, "call"])
            self.frames.append(frame)
            self.counts[name, "call"] += 1
            self.on_enter(frame)

        with ExitStack() as hooks:
            for name, part in module.named_modules():
                entry = part.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
                hooks.enter_context(entry)
                # `always_call`: the hook runs after an error, too. A pass ends by an error once
                # all layers are read.
                leave = part.register_forward_hook(
                    lambda _part, _args, output: self.on_leave(self.frames.pop(), output),
                    always_call=True,
                )
                hooks.enter_context(leave)
            yield


class Tracer(AttentionMode):
    """An observed forward pass, whose autograd graph is cut at linear maps and attention.

    To cut is to detach the output of an op, so that the output is a leaf. The graph of q, k and v
    of an attention call then has only the ops after the last linear maps.

    Attributes:
        call_stack: the module calls in progress.
        origins: for each leaf, the op whose output it is.
        products: linear maps so far by ops that also multiply two activations, such as matmul.

    Args:
        on_attention: takes each attention call and its address.
        cut_at: addresses of the ops at which to cut. None, in surveys: every linear map of a
            tensor that depends on the input.
        uncut_maps: in surveys, linear maps at which not to cut.
        call_stack: a stack to use; None: a new one.
        loops: attention calls that are reported as one, after the last of them.
    """

    def __init__(
        self,
        on_attention: OnAttention | None = None,
        *,
        cut_at: frozenset[Address] | None = None,
        uncut_maps: frozenset[Address] = frozenset(),
        call_stack: CallStack | None = None,
        loops: Iterable[Loop | None] = (),
    ) -> None:
        super().__init__(on_attention)
        # The ops at which to cut the graph. None, in surveys: at all linear maps of tensors that
        # depend on the input, but for `uncut_maps`.
        self.cut_at = cut_at
        self.uncut_maps = uncut_maps
        self.call_stack = call_stack or CallStack()
        self.origins = Origins()  # for each leaf at a cut, the op whose output it is
        # A loop: attention calls that together compute one layer, such as one head each. By the
        # address of each call.
        self.loops: dict[Address, Loop] = {}
        for loop in loops:
            if loop is not None:
                self.loops |= dict.fromkeys(loop.addresses, loop)
        # Linear maps by ops that also multiply two activations, such as matmul. With a constant
        # factor, such an op may be no linear map but q k^T, of learned queries (`notice_scores`).
        self.products: set[Address] = set()
        # The calls of a loop so far, until its last call completes the layer.
        self._waiting: dict[Address, AttentionCall] = {}

    def cut_input(self, t: Tensor) -> Tensor:
        """Return the model's input, or a text's embeddings, as a new leaf if this pass cuts there.

        Otherwise return the tensor itself.
        """
        address = self.call_stack.address("input")
        if self.cut_at is None or address in self.cut_at:
            return self._cut(t, Origin(address))
        return t

    def run_linear(
        self, func: TorchFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Run an op if it is a linear map at which to cut, and return its output as a leaf.

        None for any other op: the caller then runs the op.

        Args:
            func: the function of torch that the model calls.
            args: the arguments of this call.
            kwargs: the keyword arguments of this call.
        """
        reader = READERS.get(func)
        if reader is None:  # no function of torch that applies linear maps
            return None
        # Every such op gets a number, cut or not, so that numbers are the same in every pass.
        right_address = self.call_stack.address(calls.RIGHT)
        product = reader(*args, **kwargs)
        if product is None:  # with these arguments no linear map, such as a 3x3 convolution
            return None
        found = self._find_map(product, right_address)
        if found is None:  # a product of two activations, or a map at which not to cut
            return None
        linear, address = found
        if not product.is_linear_layer:  # it may be q k^T of learned queries: see `Surveyor`
            self.products.add(address)
        output = func(*args, **kwargs)
        result = self._cut(output, self._make_origin(linear, address))
        # Later ops cannot see behind the cut: note which attention, if any, the map reads.
        self.remember(linear, result)
        return result

    def _find_map(self, product: Contraction, address: Address) -> tuple[Linear, Address] | None:
        """Return a product as a linear map with its address, if the graph is to be cut there.

        None if it is a product of two activations, or a map at which not to cut.

        Args:
            product: the product of two factors, x W or W x.
            address: its address, if the right factor is the weight. If it is the left one, the
                address has another `op`: which operation of its module this is, and which way
                its factors are read.
        """
        for op, factors in product.read_both_ways():
            address = address._replace(op=op)
            if self._is_map(factors, address):
                linear = factors.read()
                if linear is not None:
                    return linear, address
        return None

    def _make_origin(self, linear: Linear, address: Address) -> Origin:
        """Return the data of a linear map to keep with the leaf that replaces its output."""
        bias = linear.bias
        if bias is not None:
            bias = bias.detach()
        # Store a reference to the weight. A weight that was converted for this op is then freed
        # after the op, and not kept in memory as long as the graph.
        constant = Linear(linear.x.detach(), refer_to_weight(linear.weight), bias, linear.arrange)
        writes = count_writes(linear.x)
        summary = summarise_rows(constant.x)
        if self.cut_at is not None:  # no survey: later passes read only the map itself
            return Origin(address, constant, writes=writes, summary=summary)
        ancestors = self._find_ancestors(linear.x, address)
        return Origin(address, constant, ancestors, divides_channels(linear.x), writes, summary)

    def _find_ancestors(self, x: Tensor, address: Address) -> Ancestors:
        """Return the tensors that a linear map reads, directly or through earlier linear maps.

        In x_0 -> y_0 = x_0 A -> x_1 = norm(y_0) -> y_1 = x_1 B, the map B reads x_1 directly, and
        x_0 through the map A. Each tensor comes with the maps to leave uncut, so that the nearest
        map at which the graph is cut reads this tensor: no map for x_1, B for x_0.

        Args:
            x: the input of the map (x_1).
            address: the address of the map (B).
        """
        # Each tensor is given by an object that identifies it (`root`). The tensors themselves
        # would keep all activations of the model in memory.
        ancestors: Ancestors = ((root(x), ()),)
        earlier = self.origins.find_leaves(x)
        if len(earlier) == 1:  # x is made from the output of one linear map
            behind = earlier[0].origin.ancestors
            # Behind the earlier map A: x_0, with no map. From here, x_0 needs B (`address`) uncut.
            ancestors += tuple((mark, (address, *maps)) for mark, maps in behind)
        # Tensors behind more maps are left out: known models apply at most three maps in sequence
        # to the input of a layer, to compute q, k or v.
        return ancestors[:_DEEPEST]

    def _is_map(self, factors: Contraction, address: Address) -> bool:
        """Say whether to cut the graph at a product x W, because the product is a linear map of x.

        The product is a linear map if x depends on the sample and W does not. While the model
        runs, exactly the tensors that depend on the sample require gradients.

        Args:
            factors: the product, with one of its factors as x and the other one as the weight.
            address: the address of the product with this order of factors.
        """
        if self.cut_at is not None:  # an earlier survey has decided
            return address in self.cut_at
        if address in self.uncut_maps:
            return False
        x = factors.x
        bias = factors.bias
        weight_depends = factors.weight.requires_grad or (bias is not None and bias.requires_grad)
        if weight_depends or not x.requires_grad:
            return False
        if factors.is_linear_layer:  # F.linear and the like; otherwise a matmul or einsum
            return True
        # A matmul may also multiply the queries or keys of one head by a constant, such as a
        # rotation or position vectors. Do not cut there: q or k must start at the earlier linear
        # map. Three cases, if x is made from the output of one earlier map:
        #     all columns of the output (LoRA, a latent): a second linear map, cut
        #     some columns, as an affine function: queries or keys of a head, do not cut
        #     some columns, not affine (a norm comes between): a second linear map, cut
        behind = self.origins.find_leaves(x)
        earlier = behind[0].origin.linear if len(behind) == 1 else None
        if earlier is None or factors.width >= earlier.parameter.shape[1]:
            return True
        return not is_affine(x)

    def complete(self, call: AttentionCall) -> tuple[AttentionCall | None, Address, Tensor]:
        """Return the attention call to report, its address, and the output for the model.

        The call to report is None if further calls of the same layer follow: an earlier pass has
        found which calls form one layer (`loops`). The model goes on with the output, which no
        longer depends on the graph of this call.
        """
        address = self.call_stack.address("attention")
        # Every module that runs now lists the call. If a module runs again by itself later, for
        # numerical norms, its calls have other addresses. Their positions in this list are the
        # same.
        for frame in self.call_stack.frames:
            frame.attentions.append(address)
        output = self._release_output(call.output, address)
        call = replace(call, origins=self.origins)  # the linear maps behind q, k and v
        return self._join_loop(call, address), address, output

    def _release_output(self, output: Tensor, address: Address) -> Tensor:
        """Return the output of an attention call without its graph, so that the graph is freed.

        The result is a new leaf of the autograd graph if a later layer may need gradients with
        respect to it. In the first pass, the survey, any layer may start at any output. It finds
        the ops at which layers start (`cut_at`), and later passes make leaves only there.
        """
        if self.cut_at is None:  # a survey
            is_new_leaf = output.requires_grad  # if not, the output is the same for all samples
        else:
            is_new_leaf = address in self.cut_at
        if is_new_leaf:
            return self._cut(output, Origin(address))
        return output.detach()

    def _join_loop(self, call: AttentionCall, address: Address) -> AttentionCall | None:
        """Return the call to report: a call, or the calls of a loop joined to one; else None.

        Some models compute one layer in a loop, such as one head after the other. The calls wait
        for the last one, which returns all. If a model leaves out some of them for a sample, none
        is reported.
        """
        loop = self.loops.get(address)
        if loop is None:
            return call
        self._waiting[address] = call
        is_complete = all(part in self._waiting for part in loop.addresses)
        if address != loop.addresses[-1] or not is_complete:
            return None
        return loop.join([self._waiting.pop(part) for part in loop.addresses])

    def _cut(self, t: Tensor, origin: Origin) -> Tensor:
        """Cut the graph at t: return the values of t as a new leaf, whose origin is noted."""
        # The graph before t is freed, so that a pass holds the graph of one layer at a time.
        leaf = t.detach().requires_grad_()
        self.origins.by_leaf[leaf] = origin
        return leaf.clone()  # the model may write into its tensor, but not into a leaf


def run(net: Net, batch: Batch, tracer: Tracer) -> Tensor:
    """Run a model on a batch while a tracer observes it, and return its output.

    In float64 the model's own casts to lower precision are left out.
    """
    # `wide` is entered after the tracer. So it changes the model's casts, and not the casts that
    # the tracer makes.
    wide = widen_casts(net.dtype)
    following = tracer.call_stack.following(net.module)
    # The graph of a text model is cut at its token embedding (by the hook), and of other models at
    # the input itself.
    with torch.enable_grad(), following, tracer, wide, watch_embeddings(net, tracer.cut_input):
        x = batch.x if net.kind == "text" else tracer.cut_input(batch.x)
        return net.read(net.call(x, batch.mask)).detach()


def fork_random(net: Net) -> AbstractContextManager[None]:
    """Restore the state of the random generators of a model's devices when the block ends."""
    devices = {p.device for p in net.module.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))


def watch_embeddings(
    net: Net, change: Callable[[Tensor], Tensor | None]
) -> AbstractContextManager[None]:
    """Pass the outputs of a text model's token embedding through `change`, inside the block.

    The same happens to the outputs of every embedding module with the same weight (encoder and
    decoder). If `change` returns None, the output stays. Models of other inputs are not changed.
    """
    embeddings: list[nn.Module] = []
    if net.kind == "text" and net.entry is not None:
        table = getattr(net.entry, "weight", None)
        for part in net.module.modules():
            if isinstance(part, nn.Embedding) and part.weight is table:
                embeddings.append(part)
        if not embeddings:
            embeddings.append(net.entry)
    unnamed = (("", module) for module in embeddings)  # `change` needs no names
    return watch_modules(unnamed, lambda _name, _args, out: change(out))
