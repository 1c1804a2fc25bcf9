"""The tower of Megatron's modules against transformers' own, for grids whose windows are cut off at the edges.

window of 2 x 2 merged patches    a a b b c        3 x 5 merged patches: six windows of 4, 4, 2, 2, 2 and 1
                                  a a b b c
                                  d d e e f
"""

from __future__ import annotations

import pytest
import torch
from host_tiny import CONFIG, oracle_model, video_prompt
from megatron_tiny import Case, make_rank

from rollplex.backends.hf.precision import KeepDouble
from rollplex.backends.megatron.grid import Grid


def test_windows_and_their_order() -> None:
    """The drawing above, with blocks of four patches."""
    order, bounds = Grid(1, 6, 10, merge=2, window=2).windows()
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert bounds.tolist() == [0, 16, 32, 40, 48, 56, 60]


def test_frames_are_apart_and_patches_come_block_by_block() -> None:
    """Two frames of 2 x 4 patches: rows and columns inside a block first."""
    grid = Grid(2, 2, 4, merge=2, window=4)
    assert grid.whole_frames().tolist() == [0, 8, 16]
    assert grid.windows()[1].tolist() == [0, 8, 16]
    rows, columns = grid.coordinates().tolist()
    assert rows == [0, 0, 1, 1, 0, 0, 1, 1] * 2
    assert columns == [0, 1, 0, 1, 2, 3, 2, 3] * 2


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 6, 10), (2, 6, 8), (3, 10, 4), (2, 14, 6)])
@pytest.mark.parametrize("recompute", [False, True])
def test_features_and_gradients_equal_transformers(grid: tuple[int, int, int], recompute: bool) -> None:
    """Window and full attention blocks, in float64, with and without recomputation."""
    oracle = oracle_model(CONFIG, torch.float64)
    rank, _ = make_rank(CONFIG, {n: p.detach() for n, p in oracle.named_parameters()}, torch.float64, case=Case())
    prompt = video_prompt(oracle, grid)
    assert prompt.pixel_values is not None
    assert prompt.grid_thw is not None
    pixels = prompt.pixel_values.double()
    with KeepDouble():
        wanted = oracle.model.visual(pixels, prompt.grid_thw).pooler_output
        wanted.square().sum().backward()
    found = rank.model.vision(pixels, prompt.grid_thw, recompute)
    found.square().sum().backward()
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    theirs = dict(oracle.named_parameters())
    for parameter in rank.of("vision"):
        (piece,) = parameter.pieces
        ours = rank.model.get_parameter(parameter.name).grad
        assert ours is not None
        scale = max(1.0, theirs[piece.source].grad.abs().max().item())
        assert (ours - theirs[piece.source].grad).abs().max() <= 1e-10 * scale, parameter.name
