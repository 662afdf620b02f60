"""Layers that are replaced, alone or with their siblings, give what they gave."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fastdraft.models.linears import FEW_ROWS, Site, fill_rows, replace, sites
from tests import tiny

QKV = ("q_proj", "k_proj", "v_proj")


class Counted(nn.Module):
    """A plain layer over a site's weights that counts its calls."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.weight, self.bias, self.calls = site.weight(), site.bias(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.linear(x, self.weight, self.bias)


def parent(names: tuple[str, ...] = QKV, *, biases: tuple[bool, ...] = (True, True, True), k: int = 16) -> nn.Module:
    made = nn.Module()
    with torch.random.fork_rng():
        for size, (name, bias) in enumerate(zip(names, biases, strict=True), 1):
            made.add_module(name, nn.Linear(k, 8 * size, bias=bias))
    return made.requires_grad_(False)


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs(module: Any, x: torch.Tensor, names: tuple[str, ...] = QKV) -> list[torch.Tensor]:
    return [getattr(module, name)(x) for name in names]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gemma2"])
def test_every_linear_layer_of_a_model_is_found_once(architecture: str) -> None:
    model = tiny.model(architecture)
    found = [layer for site in sites(model) for layer in site.layers]
    assert {id(layer) for layer in found} == {id(m) for m in model.modules() if type(m) is nn.Linear}
    assert len(found) == len({id(layer) for layer in found})
    names = [site.name for site in sites(model)]
    assert len(set(names)) == len(names)
    assert "lm_head" in names
    if architecture != "phi3":  # whose projections are one already
        assert "model.layers.1.self_attn.q_proj+k_proj+v_proj" in names
        assert "model.layers.0.mlp.gate_proj+up_proj" in names


@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False)])
def test_siblings_are_one_product_with_the_same_outputs(biases: tuple[bool, ...]) -> None:
    module = parent(biases=biases)
    xs = [inputs(1, rows, 16, seed=rows) for rows in (1, 5)]
    expected = [outputs(module, x) for x in xs]
    made: list[Counted] = []
    assert replace(module, lambda site: made.append(Counted(site)) or made[-1]) == 1
    for x, want in zip(xs, expected, strict=True):
        for got, one in zip(outputs(module, x), want, strict=True):
            torch.testing.assert_close(got, one)
    assert made[0].calls == len(xs)


@pytest.mark.parametrize(
    ("names", "biases"),
    [(("q_proj", "v_proj"), (True, True)), (QKV, (True, True, False)), (("gate_proj", "down_proj"), (False, False))],
)
def test_layers_that_are_no_siblings_stay_alone(names: tuple[str, ...], biases: tuple[bool, ...]) -> None:
    module = parent(names, biases=biases)
    assert [site.names for site in sites(module)] == [(name,) for name in names]
    x = inputs(1, 3, 16)
    expected = outputs(module, x, names)
    assert replace(module, Counted) == len(names)
    for got, want in zip(outputs(module, x, names), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_an_input_that_comes_again_is_computed_again() -> None:
    """The tensor may have been written to in the meantime."""
    module = parent()
    made: list[Counted] = []
    plain = parent()
    plain.load_state_dict(module.state_dict())
    replace(module, lambda site: made.append(Counted(site)) or made[-1])
    x = inputs(1, 2, 16)
    outputs(module, x)
    x.mul_(2)
    for got, want in zip(outputs(module, x), outputs(plain, x), strict=True):
        torch.testing.assert_close(got, want)
    assert made[0].calls == 2


def test_a_pass_that_broke_off_leaves_nothing_to_the_next() -> None:
    module = parent()
    plain = parent()
    plain.load_state_dict(module.state_dict())
    replace(module, Counted)
    module.q_proj(inputs(1, 2, 16))  # type: ignore[operator]
    x = inputs(1, 2, 16, seed=1)
    for got, want in zip(outputs(module, x), outputs(plain, x), strict=True):
        torch.testing.assert_close(got, want)


def test_threads_don_t_mix() -> None:
    module = parent()
    plain = parent()
    plain.load_state_dict(module.state_dict())
    met = threading.Barrier(2)

    class Meeting(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            met.wait(timeout=30)  # both have begun, neither has its product
            return super().forward(x)

    replace(module, Meeting)
    results: dict[int, list[torch.Tensor]] = {}

    def work(seed: int) -> None:
        found = [getattr(module, name)(xs[seed]) for name in QKV[:2]]
        met.wait(timeout=30)
        results[seed] = [*found, module.v_proj(xs[seed])]  # type: ignore[operator]

    xs = [inputs(1, 3, 16, seed=seed) for seed in range(2)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, x in enumerate(xs):
        for got, want in zip(results[seed], outputs(plain, x), strict=True):
            torch.testing.assert_close(got, want)


def test_what_is_not_made_stays() -> None:
    module = parent()
    before = dict(module.named_children())
    assert replace(module, lambda site: None) == 0
    assert dict(module.named_children()) == before


@pytest.mark.parametrize("rows", range(1, 7))
def test_few_rows_are_filled_with_zeros(rows: int) -> None:
    x = inputs(1, rows, 16)
    filled = fill_rows(x)
    assert filled.shape == (1, max(rows, FEW_ROWS), 16)
    assert torch.equal(filled[:, :rows], x)
    assert not filled[:, rows:].any()
