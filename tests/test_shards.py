"""What a rank holds under pipeline, context and expert parallelism: counted by hand, and all ranks make the model."""

from __future__ import annotations

import pytest

from rollplex.ir.models import ModelSpec, load_model
from rollplex.ir.shards import Degrees, owned_parameters, rank_parameters, stage_layers, stage_parameters

D32, D3, MOE = load_model("Qwen2.5-VL-32B"), load_model("Qwen2.5-VL-3B"), load_model("Qwen3-VL-235B-A22B")

# Qwen2.5-VL-32B by hand: q, k, v with biases, o, gate, up, down, two norms
LAYER_32B = 5120 * 5120 + 5120 + 2 * (5120 * 1024 + 1024) + 5120 * 5120 + 3 * 5120 * 27648 + 2 * 5120
EMBED_32B = 152064 * 5120


def held_on(spec: ModelSpec, degrees: Degrees, stage: int) -> tuple[int, int]:
    """Dense parameters and those of experts, of both parts of the model."""
    vision, language = (stage_parameters(spec, degrees, stage, part) for part in ("vision", "language"))
    return vision[0] + language[0], vision[1] + language[1]


def test_stages_of_the_32b_model_by_hand() -> None:
    """4 stages of 16 layers; embedding and tower on the first, final norm and head on the last."""
    tower = D32.vision_parameters
    degrees = Degrees(pp=4)
    held = [sum(held_on(D32, degrees, stage)) for stage in range(4)]
    assert held == [16 * LAYER_32B + EMBED_32B + tower, *[16 * LAYER_32B] * 2, 16 * LAYER_32B + EMBED_32B + 5120]
    assert rank_parameters(D32, degrees, "language", "vision") == held[0]
    assert rank_parameters(D32, degrees, "language") == held[3]


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_stages_together_are_the_model(pp: int) -> None:
    """Nothing is left out or held twice, but for a tied embedding, which the last stage copies."""
    for spec in (D32, D3, MOE):
        total = sum(sum(held_on(spec, Degrees(pp=pp), stage)) for stage in range(pp))
        copy = spec.vocab * spec.hidden if spec.tied and pp > 1 else 0
        assert total - copy == spec.parameters


def test_experts_are_dealt_out_whole_and_the_rest_is_repeated() -> None:
    """235B: 94 layers of 128 experts; with EP 8 a rank has 16 of every layer, and all attention and routers."""
    assert MOE.moe is not None
    expert = 3 * MOE.hidden * MOE.moe.ffn
    dense, experts = held_on(MOE, Degrees(ep=8), 0)
    assert experts == 94 * 16 * expert
    assert dense == MOE.parameters - 94 * 128 * expert
    assert held_on(MOE, Degrees(tp=4, ep=8), 0)[1] == experts // 4


@pytest.mark.parametrize(
    "degrees",
    [Degrees(dp=8), Degrees(tp=2, dp=4), Degrees(pp=2, dp=8), Degrees(tp=4, cp=2, dp=4, ep=8), Degrees(dp=4, ep=4)],
)
def test_sharded_optimizer_state_is_kept_once(degrees: Degrees) -> None:
    """All ranks of all stages together keep every parameter's state once (each at most one element a rank rounded)."""
    for spec in (D32, MOE):
        kept = owned_parameters(spec, degrees, "language")
        ranks = degrees.replicas
        dense, experts = (
            sum(stage_parameters(spec, degrees, stage, "language")[kind] for stage in range(degrees.pp))
            for kind in (0, 1)
        )
        once = dense + experts * degrees.ep
        assert kept * ranks >= once / degrees.pp
        if degrees.pp == 1:
            assert once <= kept * ranks < once + 2 * ranks


def test_megatrons_bytes_a_parameter() -> None:
    """18 a parameter; 6 + 12 / DP with the distributed optimizer (numbers, theoretical_memory_usage.py)."""
    for dp in (1, 2, 8):
        degrees = Degrees(tp=4, dp=dp)
        held, owned = rank_parameters(D32, degrees, "language"), owned_parameters(D32, degrees, "language")
        assert (6 * held + 12 * owned) / held == pytest.approx(6 + 12 / dp, rel=1e-6)


def test_layers_are_dealt_out_evenly_but_for_stated_ends() -> None:
    """94 layers over 4 stages: 22 on the first leave 24 each; the last with 24 of its own leaves 24, 24 of 48."""
    assert stage_layers(94, Degrees(pp=2)) == (47, 47)
    assert stage_layers(64, Degrees(pp=8)) == (8,) * 8
    assert stage_layers(94, Degrees(pp=4, first=22)) == (22, 24, 24, 24)
    assert stage_layers(94, Degrees(pp=4, first=22, last=24)) == (22, 24, 24, 24)
    assert stage_layers(94, Degrees(pp=4, last=19)) == (25, 25, 25, 19)
    assert stage_layers(5, Degrees(pp=2, first=2, last=3)) == (2, 3)
    assert str(Degrees(tp=8, pp=2, ep=4)) == "TP8 PP2 EP4"
