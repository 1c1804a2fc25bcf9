"""Heads from a fused projection by one kernel are those of torch's operators, forward and backward.

On a GPU the kernel itself; elsewhere Triton's interpreter runs it, which does not round to bfloat16 as a GPU does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module, util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, oracle_model, video_prompt
from megatron_tiny import Case, step
from torch import Tensor

from benchmarks import layers as small
from rollplex.backends.cuda import launch
from rollplex.backends.megatron import layers, memory, prefix
from rollplex.backends.megatron.attention import ReadPrefix
from rollplex.backends.megatron.names import parameters
from rollplex.backends.megatron.rank import PARTS, MegatronModel
from rollplex.backends.megatron.rotary import Turning
from rollplex.ir.models import spec_from_config
from rollplex.ir.spec import Part

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXACT = 1e-6
MODULE = "rollplex.backends.cuda.heads"
Row = tuple[int, int, int]
ROWS: list[tuple[Row, int]] = [((2, 8, 1), 128), ((4, 7, 1), 128), ((1, 16, 16), 80), ((1, 5, 1), 80), ((3, 1, 1), 20)]
Kernel = Callable[[Tensor, Tensor, Tensor, Row], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The function; interpreted in a copy of its module that nobody else sees."""
    if GPU:
        return import_module(MODULE).heads
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "on", lambda _: nullcontext())
    spec: Any = util.find_spec(MODULE)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.heads


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The textbook's: pairs are element i and i + d / 2."""
    first, second = x.chunk(2, dim=-1)
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def apart(mixed: Tensor, cos: Tensor, sin: Tensor, row: Row) -> list[Tensor]:
    """[t, 1, width] taken apart by torch's operators, in the dtype that is given."""
    groups, *each = row[0], row[1], row[2], row[2]
    query, key, value = (x.flatten(2, 3) for x in mixed.unflatten(-1, (groups, sum(each), -1)).split(each, dim=3))
    return [turned(query, cos, sin), turned(key, cos, sin), value]


def fused(tokens: int, row: Row, d: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A projection's output, cosines, sines; gradients of what is made of it, those of the keys head by head."""
    groups, queries, keys = row
    angles = drawn(tokens, d // 2)
    grads = [drawn(tokens, 1, groups * n, d, dtype=dtype) for n in (queries, keys, keys)]
    grads[1] = drawn(groups * keys, tokens, 1, d, dtype=dtype).permute(1, 2, 0, 3)
    mixed = drawn(tokens, 1, groups * (queries + 2 * keys) * d, dtype=dtype).requires_grad_()
    return [mixed, angles.cos(), angles.sin(), *grads]


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize(("row", "d"), ROWS)
def test_a_projection_is_taken_apart_as_torch_takes_it_apart(heads: Kernel, tokens: int, row: Row, d: int) -> None:
    """Of language layers and of the tower, also where nobody wants the queries' gradient."""
    mixed, cos, sin, *grads = fused(tokens, row, d)
    exact = mixed.detach().double().requires_grad_()
    ours, theirs = heads(mixed, cos, sin, row), apart(exact, cos.double(), sin.double(), row)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=EXACT, atol=EXACT)
        assert found.is_contiguous()
    assert torch.equal(ours[2], theirs[2].float())
    with torch.no_grad():
        assert all(torch.equal(x, y) for x, y in zip(heads(mixed, cos, sin, row), ours, strict=True))
    for some in (slice(0, 3), slice(1, 3)):
        (found,) = torch.autograd.grad(ours[some], mixed, grads[some], retain_graph=True)
        (wanted,) = torch.autograd.grad(theirs[some], exact, [g.double() for g in grads[some]], retain_graph=True)
        torch.testing.assert_close(found, wanted.float(), rtol=EXACT, atol=EXACT)


@pytest.mark.skipif(not GPU, reason="no GPU here")
@pytest.mark.parametrize(("row", "d"), ROWS)
def test_heads_of_bfloat16_are_rounded_once(heads: Kernel, row: Row, d: int) -> None:
    """Half a unit in the last of eight bits, forward and backward; values are copied."""
    mixed, cos, sin, *grads = fused(37, row, d, torch.bfloat16)
    exact = mixed.detach().double().requires_grad_()
    ours, theirs = heads(mixed, cos, sin, row), apart(exact, cos.double(), sin.double(), row)
    (found,) = torch.autograd.grad(ours, mixed, grads)
    (wanted,) = torch.autograd.grad(theirs, exact, [g.double() for g in grads])
    for x, y in zip([*ours, found], [*theirs, wanted], strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y, rtol=2**-8, atol=EXACT)
    assert torch.equal(ours[2].double(), theirs[2])


def test_what_is_kept_of_a_projection_is_its_angles(heads: Kernel) -> None:
    """Queries, keys and values are attention's to keep; the projection itself goes."""
    mixed, cos, sin, *_ = fused(37, (2, 8, 1), 128)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        made = heads(mixed, cos, sin, (2, 8, 1))
    assert [x.data_ptr() for x in kept] == [cos.data_ptr(), sin.data_ptr()]
    assert sum(x.untyped_storage().nbytes() for x in made) == 4 * mixed.numel()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_the_kernel_runs_where_its_tensors_are(heads: Kernel) -> None:
    """Triton launches on the current device, which need not be that of the tensors."""
    mixed, cos, sin, *grads = (x.detach().to("cuda:1") for x in fused(19, (1, 2, 1), 16))
    mixed.requires_grad_()
    there = heads(mixed, cos, sin, (1, 2, 1))
    (of_row,) = torch.autograd.grad(there, mixed, grads)
    wanted = apart(mixed, cos, sin, (1, 2, 1))
    (wanted_of_row,) = torch.autograd.grad(wanted, mixed, grads)
    for found, right in zip([*there, of_row], [*wanted, wanted_of_row], strict=True):
        torch.testing.assert_close(found, right, rtol=EXACT, atol=EXACT)


# ---- a layer


WIDER: dict[str, dict[str, Any]] = {  # heads that a GPU's attention takes: of 64, and of the tower's 80
    "text_config": {"hidden_size": 256, "num_hidden_layers": 1},
    "vision_config": {"hidden_size": 160, "out_hidden_size": 256},
}
LENGTHS = [5, 1, 31]


def made() -> MegatronModel:
    """A rank of one language layer and one block of the tower, in the dtype that kernels of attention take."""
    config = {**small.CONFIG, **{part: small.CONFIG[part] | more for part, more in WIDER.items()}}
    config["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    spec, dtype = spec_from_config(config, "small"), torch.bfloat16 if GPU else torch.float32
    order = parameters(spec, 1, 0)
    pages: dict[Part, Tensor] = {
        part: drawn(memory.numel([p for p in order if p.part == part])).mul(0.3).to(dtype) for part in PARTS
    }
    return MegatronModel(spec, dtype, pages)


def parts(rank: MegatronModel) -> dict[str, tuple[Any, Any, int]]:
    """A layer, what its queries may see, and elements of a head: a prompt, responses after it, windows."""
    kv = drawn(1, 2, 2, 300, 64).to(rank.model.dtype)
    layer, (block,) = rank.model.layers[0], rank.model.vision.blocks
    windows = torch.tensor([0, 16, 32, sum(LENGTHS)])
    return {"prompt": (layer, None, 64), "suffix": (layer, ReadPrefix(kv, LENGTHS), 64), "tower": (block, windows, 80)}


@pytest.mark.parametrize("what", ["prompt", "suffix", "tower"])
def test_a_layer_is_what_it_is_by_torchs_operators(
    heads: Kernel, monkeypatch: pytest.MonkeyPatch, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output, and gradients of its input and of every parameter; the operators turn in float32 and round once too."""
    layer, mask, d = parts(made())[what]
    angles = drawn(sum(LENGTHS), d // 2)
    width = layer.config.hidden_size
    hidden, grad = (drawn(n, sum(LENGTHS), 1, width)[0] for n in (1, 2))
    found = list[list[Tensor]]()
    for way in (heads, plainly):
        monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(heads=way))
        given = hidden.to(layer.config.params_dtype).requires_grad_()
        out = layer(given, mask, Turning(angles.cos(), angles.sin()))
        found.append([out, *torch.autograd.grad(out, [given, *layer.parameters()], grad.to(out.dtype))])
    worst = max(off(x, y) for x, y in zip(*found, strict=True))
    with capsys.disabled():
        print(f"\n  {what}: off by {worst:.1e} of the norm at most")
    assert worst < (0.005 if GPU else 1e-5)
    assert all(x.abs().max() > 0 for x in found[0])


@pytest.mark.skipif(GPU, reason="there the kernel runs in every step")
@pytest.mark.parametrize("case", [Case(), Case(prefix="full", where="host", recompute=True)], ids=["kept", "again"])
def test_a_training_step_is_a_hosts(heads: Kernel, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Through a boundary, whose gradients lie head by head, and a last layer whose queries have none."""
    oracle = oracle_model(CONFIG, torch.float32)
    groups = [(video_prompt(oracle, (1, 2, 2)), [torch.tensor([5, 6]), torch.tensor([8])])]
    weights, calls = dict(oracle.state_dict()), [0]

    def counted(*given: Any) -> tuple[Tensor, ...]:
        calls[0] += 1
        return heads(*given)

    wanted = step(CONFIG, weights, torch.float32, groups, case)
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(heads=counted))
    for module in (layers, prefix):
        monkeypatch.setattr(module, "turning", lambda angles: Turning(*as_cosines(angles)))
    found = step(CONFIG, weights, torch.float32, groups, case)
    assert calls[0] == (2 + 3) * (1 + case.recompute) - case.recompute + 3 * (2 + case.recompute)
    assert found.gathered is not None
    assert wanted.gathered is not None
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
    assert max(off(found.gathered[name], x) for name, x in wanted.gathered.items()) < 1e-5


def as_cosines(angles: Tensor) -> tuple[Tensor, Tensor]:
    half = angles[:, 0, 0, : angles.shape[-1] // 2]
    return half.cos(), half.sin()


def plainly(mixed: Tensor, cos: Tensor, sin: Tensor, row: Row) -> tuple[Tensor, ...]:
    return tuple(x.to(mixed.dtype) for x in apart(mixed.float(), cos, sin, row))


def off(found: Tensor, right: Tensor) -> float:
    """The error as a share of the norm."""
    return float((found.detach().double() - right.detach().double()).norm() / right.detach().double().norm())
