"""A tiny model of the real architecture, its prompts, and the whole-sequence pass that ours is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.model import bind, build_model
from rollplex.backends.hf.precision import KeepDouble

torch.set_num_threads(1)
VIDEO, IMAGE = 63, 62

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 60,
    "vision_end_token_id": 61,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 58,
        "eos_token_id": 59,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 14,
        "window_size": 56,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    },
}


def tied(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "tie_word_embeddings": True}


def oracle_model(config: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> Any:
    """Transformers' model as anyone would build it, with weights large enough that every part matters."""
    torch.manual_seed(seed)
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(dict(config)))
    model.to(dtype=dtype).train()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=dtype) * 0.15 + (1.0 if p.dim() == 1 and p.mean() > 0.5 else 0.0))
    return model


def arena_model(oracle: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Our model with every parameter a view of one flat arena, holding the oracle's values."""
    model = build_model(config, dtype)
    arena = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=dtype)
    views, at = {}, 0
    for name, p in model.named_parameters():
        views[name] = arena[at : at + p.numel()].view(p.shape)
        at += p.numel()
    bind(model, views)
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            views[name].copy_(p)
    return model, arena


def video_prompt(
    model: Any, grid: tuple[int, int, int] = (2, 6, 8), text: int = 5, seed: int = 1, seconds: float = 0.5
) -> Prompt:
    """Random text around a random video (or an image when grid[0] is 1)."""
    rng = torch.Generator().manual_seed(seed)
    kind = "image" if grid[0] == 1 else "video"
    pads = torch.full((grid[0] * grid[1] * grid[2] // 4,), IMAGE if kind == "image" else VIDEO)
    words = torch.randint(0, 50, (2 * text,), generator=rng)
    ids = torch.cat([words[:text], torch.tensor([60]), pads, torch.tensor([61]), words[text:]])
    types = ((ids == IMAGE) * 1 + (ids == VIDEO) * 2)[None]
    thw = torch.tensor([grid])
    positions, delta = model.model.get_rope_index(
        ids[None], types, **{f"{kind}_grid_thw": thw}, second_per_grid_ts=torch.tensor([seconds])
    )
    pixels = torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14, generator=rng)
    next_position = len(ids) + int(delta)
    return Prompt("row 1", "?", "!", ids, positions[:, 0], next_position, kind, pixels, thw, seconds)


def text_prompt(tokens: int = 9, seed: int = 2) -> Prompt:
    ids = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Prompt("row 2", "?", "!", ids, torch.arange(tokens).expand(3, tokens), tokens)


def responses_of(lengths: Sequence[int], seed: int = 3) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (n,), generator=rng) for n in lengths]


def whole_logprobs(model: Any, prompt: Prompt, response: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of one response from one full-sequence call of plain transformers."""
    ids = torch.cat([prompt.input_ids, response])[None]
    kwargs: dict[str, Any] = {}
    if prompt.modality != "text":
        key = "pixel_values" if prompt.modality == "image" else "pixel_values_videos"
        kwargs = {
            key: prompt.pixel_values,
            f"{prompt.modality}_grid_thw": prompt.grid_thw,
            "mm_token_type_ids": ((ids == IMAGE) * 1 + (ids == VIDEO) * 2).int(),
            "second_per_grid_ts": torch.tensor([prompt.seconds_per_grid]),
        }
    logits = model(input_ids=ids, use_cache=False, **kwargs).logits[0, len(prompt.input_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]


def grpo_loss(logp: Tensor, mask: Tensor, seed: int = 5) -> Tensor:
    """Clipped ratio and KL with made-up old and reference log-probabilities and advantages; a sum over tokens."""
    rng = torch.Generator().manual_seed(seed)
    old, ref = (logp.detach() + 0.3 * torch.randn(logp.shape, generator=rng, dtype=logp.dtype) for _ in range(2))
    advantage = torch.randn(logp.shape[0], 1, generator=rng, dtype=logp.dtype)
    ratio = (logp - old).exp()
    policy = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    delta = ref - logp
    return ((-policy + 0.04 * (delta.exp() - delta - 1)) * mask).sum() / 7


def whole_gradients(
    model: Any, groups: Sequence[tuple[Prompt, list[Tensor]]], temperature: float, loss: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Gradients of every parameter from full-sequence calls, one response at a time."""
    model.zero_grad()
    with KeepDouble():
        for prompt, responses in groups:
            rows = [whole_logprobs(model, prompt, r, temperature) for r in responses]
            logp = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.arange(logp.shape[1]) < torch.tensor([len(r) for r in responses])[:, None]
            loss(logp, mask).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
