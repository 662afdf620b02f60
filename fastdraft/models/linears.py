"""A model's linear layers, replaced by faster ones; siblings that read one input become one product.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["FEW_ROWS", "Make", "Site", "fill_rows", "joined_product", "replace", "sites"]

# What transformers calls projections of one input; as one product they read memory in fewer, longer stretches.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# oneDNN's products of one to three rows are slower than those of four, and one row rounds in an order of its own.
FEW_ROWS = 4


class Site(NamedTuple):
    """Linear layers that are replaced together.

    Attributes:
        name: Qualified; siblings are joined with ``+``.
        parent: The module that holds them.
        names: Their attributes in the parent.
        layers: The layers.
    """

    name: str
    parent: nn.Module
    names: tuple[str, ...]
    layers: tuple[nn.Linear, ...]

    def weight(self) -> Tensor:
        """[N, K], those of siblings below each other."""
        weights = [layer.weight.detach() for layer in self.layers]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def bias(self) -> Tensor | None:
        """[N]; None where there is none."""
        biases = [layer.bias.detach() for layer in self.layers if layer.bias is not None]
        if not biases:
            return None
        return biases[0].clone() if len(biases) == 1 else torch.cat(biases)


Make: TypeAlias = Callable[[Site], nn.Module | None]


def sites(model: nn.Module) -> Iterator[Site]:
    """Every linear layer of a model, siblings together, in the order of the model's modules."""
    for path, parent in list(model.named_modules()):
        children = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for group in _SIBLINGS:
            members = tuple(children[name] for name in group if name in children)
            if len(members) == len(group) and len({layer.bias is None for layer in members}) == 1:
                yield _site(path, parent, group, members)
                for name in group:
                    del children[name]
        for name, child in children.items():
            yield _site(path, parent, (name,), (child,))


def _site(path: str, parent: nn.Module, names: tuple[str, ...], layers: tuple[nn.Linear, ...]) -> Site:
    own = "+".join(names)
    return Site(f"{path}.{own}" if path else own, parent, names, layers)


def replace(model: nn.Module, make: Make) -> int:
    """Replaces linear layers in place, one site after another, so that only one is held twice at a time.

    Args:
        model: Ours to change.
        make: Gives the layer that takes a site's place, or None to leave it.

    Returns:
        Sites that were replaced.
    """
    replaced = 0
    for site in sites(model):
        made = make(site)
        if made is None:
            continue
        replaced += 1
        if len(site.names) == 1:
            setattr(site.parent, site.names[0], made)
            continue
        joined = _Joined(made, [layer.out_features for layer in site.layers])
        for index, name in enumerate(site.names):
            setattr(site.parent, name, _Part(joined, index))
    return replaced


class _Joined:
    """One product for siblings: the first to see an input computes it, each takes its columns, the last drops it.

    Args:
        layer: From K inputs to the outputs of all of them.
        sizes: Outputs of each.
    """

    def __init__(self, layer: nn.Module, sizes: list[int]) -> None:
        self.layer = layer
        self._ends = torch.tensor(sizes).cumsum(0).tolist()
        # By thread: one model may run in two generators at once.
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    def part(self, x: Tensor, index: int) -> Tensor:
        """Columns of sibling ``index``."""
        thread = threading.get_ident()
        held = self._pending.get(thread)
        if held is None or held[0] is not x:
            held = self._pending[thread] = (x, self.layer(x))
        if index == len(self._ends) - 1:
            del self._pending[thread]
        return held[1][..., self._ends[index - 1] if index else 0 : self._ends[index]]


class _Part(nn.Module):
    """One sibling of a joined product."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self.joined = joined
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.part(x, self._index)


def joined_product(*layers: nn.Module) -> nn.Module | None:
    """The one product behind siblings that were joined, all of them, in order; None where they were not."""
    joined = {id(layer.joined) if isinstance(layer, _Part) else None for layer in layers}
    first = layers[0]
    return first.joined.layer if isinstance(first, _Part) and len(joined) == 1 else None


def fill_rows(x: Tensor) -> Tensor:
    """[..., T, K] with at least `FEW_ROWS` rows; rows that were added are zero."""
    missing = FEW_ROWS - x.shape[-2]
    return x if missing <= 0 else nn.functional.pad(x, (0, 0, 0, missing))
