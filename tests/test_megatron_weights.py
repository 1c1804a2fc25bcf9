"""A checkpoint goes through the ranks of the Megatron model and back to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, oracle_model, tied
from megatron_tiny import CASE_2, Case, group_here, make_rank
from processes import ranks
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.backends.megatron.names import Stored
from rollplex.backends.megatron.rank import MegatronModel
from rollplex.backends.megatron.weights import load_weights
from rollplex.ir.errors import JobError

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("megatron")]

ODD = {**CONFIG, "text_config": {**CONFIG["text_config"], "vocab_size": 70}}


def empty_rank(config: dict[str, Any], dtype: torch.dtype, stored: Stored) -> MegatronModel:
    """This process' rank, alone or in the group of all, its memory full of what nobody wrote."""
    weights = {n: torch.full_like(p.data, float("nan")) for n, p in oracle_model(config, dtype).named_parameters()}
    rank, pages = make_rank(config, weights, dtype, group_here(), Case(stored))
    for flat in pages.values():
        flat.fill_(float("nan"))
    return rank


def through(config: dict[str, Any], dtype: torch.dtype, stored: Stored, source: Path, target: Path) -> bool:
    """Load `source` on every rank and save it as `target`; whether no element was left as it was."""
    rank = empty_rank(config, dtype, stored)
    load_weights(source, rank.order, rank.views)
    rank.save(target)
    return not any(view.isnan().any() for view in rank.views.values())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stored", [Stored(), CASE_2], ids=["stock", "case 2"])
@pytest.mark.parametrize("config", [CONFIG, tied(CONFIG), ODD], ids=["untied", "tied", "padded"])
def test_a_directory_comes_back_to_the_bit(config: dict[str, Any], stored: Stored, tp: int, tmp_path: Path) -> None:
    """transformers -> directory -> ranks -> directory -> transformers; padding rows are zero, not what was there."""
    oracle = oracle_model(config, torch.float32)
    oracle.save_pretrained(tmp_path / "a")
    task = (config, torch.float32, stored, tmp_path / "a", tmp_path / "b")
    assert all([through(*task)] if tp == 1 else ranks(tp).run(through, *task))
    loaded: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "b", dtype=torch.float32)
    found = dict(loaded.named_parameters())
    for name, p in oracle.named_parameters():
        assert torch.equal(found[name], p), name


def test_bfloat16_is_cast_while_it_is_read(tmp_path: Path) -> None:
    """A float32 checkpoint in a bfloat16 job, rounded once, and written in bfloat16."""
    oracle = oracle_model(CONFIG, torch.float32)
    oracle.save_pretrained(tmp_path / "a")
    assert through(CONFIG, torch.bfloat16, CASE_2, tmp_path / "a", tmp_path / "b")
    wanted = oracle.lm_head.weight.bfloat16()
    assert torch.equal(load_file(tmp_path / "b/model.safetensors")["lm_head.weight"], wanted)


def test_what_is_missing_or_too_small_is_all_named(tmp_path: Path) -> None:
    """Nothing is guessed: every difference is a line, before a byte is written."""
    rank = empty_rank(CONFIG, torch.float32, Stored())
    with pytest.raises(JobError, match=r"no \.safetensors file here"):
        load_weights(tmp_path, rank.order, rank.views)
    small = {**tied(CONFIG), "text_config": {**CONFIG["text_config"], "intermediate_size": 32}}
    oracle_model(small, torch.float32).save_pretrained(tmp_path)
    with pytest.raises(JobError) as caught:
        load_weights(tmp_path, rank.order, rank.views)
    assert "no tensor lm_head.weight" in str(caught.value)
    assert "layers.0.mlp.gate_proj.weight has 32 rows along axis 0, 64 are needed" in str(caught.value)
    assert rank.views["language.decoder.final_layernorm.weight"].isnan().all()
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(JobError, match="cannot read the weights"):
        load_weights(tmp_path, rank.order, rank.views)
