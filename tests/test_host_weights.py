"""A checkpoint goes through our files and transformers' to the same numbers, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, arena_model, oracle_model, text_prompt, tied, whole_logprobs
from safetensors.torch import save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.backends.training import weights
from rollplex.backends.training.weights import disk_name, load_weights, memory_name, save_weights
from rollplex.ir.errors import JobError


@pytest.mark.parametrize("config", [CONFIG, tied(CONFIG)], ids=["untied", "tied"])
def test_what_we_save_transformers_loads_and_back(config: dict[str, Any], tmp_path: Path) -> None:
    """ours -> directory -> from_pretrained -> directory -> ours: equal to the bit."""
    oracle = oracle_model(config, torch.float32)
    model, arena = arena_model(oracle, config, torch.float32)
    views = {n: p.data for n, p in model.named_parameters()}
    save_weights(tmp_path / "a", views, config)
    loaded: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "a")
    response = torch.tensor([3, 4])
    assert torch.equal(
        whole_logprobs(loaded, text_prompt(), response, 1.0), whole_logprobs(oracle, text_prompt(), response, 1.0)
    )
    loaded.save_pretrained(tmp_path / "b")
    before = arena.clone()
    arena.zero_()
    load_weights(tmp_path / "b", views)
    assert torch.equal(arena, before)


def test_many_weights_are_written_to_as_many_files_as_are_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About equal parts, each tensor in one; transformers finds them by their index, and we do."""
    oracle = oracle_model(CONFIG, torch.float32)
    model, arena = arena_model(oracle, CONFIG, torch.float32)
    views = {n: p.data for n, p in model.named_parameters()}
    monkeypatch.setattr(weights, "FILE_BYTES", 1 << 16)
    save_weights(tmp_path, views, CONFIG)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.safetensors"))]
    assert len(sizes) == weights.AT_A_TIME
    assert (tmp_path / "model-00008-of-00008.safetensors").exists()
    total = sum(view.nbytes for view in views.values())
    assert max(sizes) < total / len(sizes) + max(view.nbytes for view in views.values()) + 10_000
    loaded: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
    assert all(torch.equal(p, oracle.get_parameter(n)) for n, p in loaded.named_parameters())
    before = arena.clone()
    arena.zero_()
    load_weights(tmp_path, views)
    assert torch.equal(arena, before)


def test_names_go_there_and_back() -> None:
    """Old names on disk, transformers 5 names in memory."""
    for name in dict(oracle_model(CONFIG, torch.float32).named_parameters()):
        assert memory_name(disk_name(name)) == name == memory_name(name)


def test_missing_tensors_and_wrong_shapes_are_all_named(tmp_path: Path) -> None:
    """Nothing is guessed: every difference is a line."""
    model, _ = arena_model(oracle_model(CONFIG, torch.float32), CONFIG, torch.float32)
    views = {n: p.data for n, p in model.named_parameters()}
    del views["lm_head.weight"]
    save_weights(tmp_path, views, CONFIG)
    views |= {"lm_head.weight": torch.zeros(2), "model.language_model.norm.weight": torch.zeros(7)}
    with pytest.raises(JobError) as caught:
        load_weights(tmp_path, views)
    assert "no tensor lm_head.weight" in str(caught.value)
    assert "model.language_model.norm.weight is [48], the config says [7]" in str(caught.value)


def test_two_files_with_one_tensor_are_refused(tmp_path: Path) -> None:
    """As where an older model's file is left beside a newer one's: nothing says which is meant."""
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        save_file({"visual.merger.ln_q.weight": torch.ones(3)}, str(tmp_path / name))
    with pytest.raises(JobError, match=r"is in model-00001-of-00002\.safetensors and in model\.safetensors"):
        load_weights(tmp_path, {"model.visual.merger.ln_q.weight": torch.empty(3)})


def test_a_directory_without_weights_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    """The message names the place and the reason."""
    with pytest.raises(JobError, match=r"no \.safetensors file here"):
        load_weights(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(JobError, match=r"model\.safetensors: cannot read the weights"):
        load_weights(tmp_path, {})
