"""Two models of one architecture: in which layers they differ, and a model with some of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError
from lipaudit.models.sources.weights import few
from lipaudit.settings.jacobian import Grouping

OTHERWISE = "Layers can be swapped between checkpoints of one architecture only."


@dataclass(frozen=True)
class LayerChange:
    """What differs between two models in one layer.

    Attributes:
        name: path of the module; of a tensor that no layer has, its own.
        tensors: names of the parameters and buffers that differ.
        entries: how many numbers these are.
        moved: ||theta_new - theta_old|| / ||theta_old|| over them; None where the old ones are 0.
    """

    name: str
    tensors: tuple[str, ...]
    entries: int
    moved: float | None


class Exchange:
    """A model whose layers can be another's.

    Tensors change places by reference: nothing is copied, and nothing written to. Of tensors that
    are one (an embedding that is the head as well) the first name stands for all.

    Attributes:
        layers: those that differ, in the order of the model.
        same: how many layers do not.
        tied: the names of each tensor that has several, where it differs.
    """

    def __init__(self, module: nn.Module, other: nn.Module, grouping: Grouping = "layer") -> None:
        """Compare two models.

        Args:
            module: the model whose layers are exchanged.
            other: the model that they come from; it stays as it is.
            grouping: `layer`: attention, MLP and norms of a block apart; `block`: together.

        Raises:
            InputError: their parameters and buffers have other names or shapes, or are tied
                otherwise.
        """
        own, theirs = _tensors(module), _tensors(other)
        _require_alike(own, theirs)
        names = _names_of_each(own)
        _require_tied(names, theirs)
        first = {each[0]: own[each[0]] for each in names}
        differ = [n for n, t in first.items() if not torch.equal(t.data, theirs[n].to(t))]
        self.leaves = {name: own[name] for name in differ}
        self._old = {name: own[name].data for name in differ}
        self._new = {name: theirs[name].data.to(own[name]) for name in differ}
        self.tied = tuple(each for each in names if len(each) > 1 and each[0] in differ)
        place = layers_of(module, list(first), grouping)
        order = list(dict.fromkeys(place.values()))
        changed = sorted(differ, key=lambda name: order.index(place[name]))
        self.layers = tuple(
            self._change(name, tuple(tensors)) for name, tensors in groupby(changed, place.get)
        )
        self.same = len(order) - len(self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """The layers that differ."""
        return tuple(layer.name for layer in self.layers)

    @contextmanager
    def holding(self, names: Collection[str]) -> Iterator[None]:
        """While the block runs, these layers are the other model's and all others its own."""
        try:
            for layer in self.layers:
                source = self._new if layer.name in names else self._old
                for name in layer.tensors:
                    self.leaves[name].data = source[name]
            yield
        finally:
            for name, leaf in self.leaves.items():
                leaf.data = self._old[name]

    def moves(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return for each layer its tensors that can be differentiated, each with new - old."""
        return [
            [
                (self.leaves[name], self._new[name] - self._old[name])
                for name in layer.tensors
                if self.leaves[name].is_floating_point()
            ]
            for layer in self.layers
        ]

    def _change(self, name: str | None, tensors: tuple[str, ...]) -> LayerChange:
        known = [t for t in tensors if self.leaves[t].is_floating_point()]
        old = _length(self._old[t] for t in known)
        moved = _length(self._new[t] - self._old[t] for t in known)
        entries = sum(self.leaves[t].numel() for t in tensors)
        return LayerChange(str(name), tensors, entries, moved / old if old else None)


def layers_of(module: nn.Module, names: Sequence[str], grouping: Grouping) -> dict[str, str]:
    """Return the layer of every tensor, by their names.

    Blocks are the innermost elements of lists of modules (ModuleList, Sequential) that have parts
    of their own. `layer` takes the parts of a block (attention, MLP, norms) apart; outside of the
    blocks the outermost module that holds none of them is a layer (patch embedding, head). What
    belongs to no such module (a class token) is a layer of its own.

    >>> block = nn.TransformerEncoderLayer(4, 1, 8)
    >>> model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": nn.Linear(4, 2)})
    >>> names = ["blocks.0.self_attn.in_proj_bias", "head.weight"]
    >>> layers_of(model, names, "layer")["blocks.0.self_attn.in_proj_bias"]
    'blocks.0.self_attn'
    >>> list(layers_of(model, names, "block").values())
    ['blocks.0', 'head']
    """
    elements = {
        f"{path}.{name}".lstrip(".")
        for path, parent in module.named_modules()
        if isinstance(parent, (nn.ModuleList, nn.Sequential))
        for name, child in parent.named_children()
        if next(child.children(), None) is not None
    }
    around = {""} | set(chain.from_iterable(map(_parents, elements)))
    blocks = elements - around
    return {name: _layer(name, blocks, around, grouping) for name in names}


def _layer(name: str, blocks: set[str], around: set[str], grouping: Grouping) -> str:
    within = next(path for path in _parents(name) if path in blocks or path in around)
    rest = name.removeprefix(f"{within}.") if within else name
    part, dot, _ = rest.partition(".")
    if within in blocks and (grouping == "block" or not dot):
        return within
    return f"{within}.{part}".lstrip(".")


def _parents(path: str) -> Iterator[str]:
    """Yield the paths that hold a path, the innermost first, the root last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, tied ones under each of their names."""
    named = (module.named_parameters, module.named_buffers)
    return dict(chain.from_iterable(each(remove_duplicate=False) for each in named))


def _require_alike(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    wrong = {
        "only the first has": [n for n in own if n not in theirs],
        "only the second has": [n for n in theirs if n not in own],
        "of other shapes are": [
            f"{n} {tuple(own[n].shape)} and {tuple(theirs[n].shape)}"
            for n in own
            if n in theirs and own[n].shape != theirs[n].shape
        ],
    }
    said = "; ".join(f"{what} {few(names)}" for what, names in wrong.items() if names)
    if said:
        raise InputError(f"the models are not of one architecture: {said}", OTHERWISE)


def _names_of_each(tensors: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return the names of every tensor: several where it is tied."""
    names: dict[object, list[str]] = {}
    for name, t in tensors.items():
        place = (t.data_ptr(), t.shape, t.stride()) if t.numel() else name
        names.setdefault(place, []).append(name)
    return list(map(tuple, names.values()))


def _require_tied(names: Sequence[Sequence[str]], theirs: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are one in the first model and differ in the second."""
    for first, *others in names:
        apart = [name for name in others if not torch.equal(theirs[name], theirs[first])]
        if apart:
            raise InputError(
                f"{first} and {few(apart)} are one tensor in the first model and two in the "
                "second",
                OTHERWISE,
            )


def _length(tensors: Iterator[Tensor]) -> float:
    """Return the Euclidean length of several tensors together."""
    squares = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors]
    return sum(squares) ** 0.5
