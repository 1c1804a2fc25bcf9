"""A short supervised start for the shapes example: the model learns to see and to answer in form, but not reliably.

python examples/shapes/warm_start.py DATA OUT

Post-training starts from a trained model. There is none of this size, so this makes one: it learns from answers a share
of which is wrong, as a model from unfiltered data would, and so answers rightly about half of the time. GRPO then has
something to raise. OUT is a Hugging Face directory: config.json, model.safetensors, tokenizer.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.shapes.reward import answer_text
from rollplex.backends.host.data import read_rows
from rollplex.backends.host.encode import PromptMaker
from rollplex.backends.host.model import bind, build_model, read_config
from rollplex.backends.host.prompts import Prompt
from rollplex.backends.host.tokens import byte_tokenizer
from rollplex.backends.host.video import VisionSpec
from rollplex.backends.host.weights import save_weights

HERE = Path(__file__).parent
SPEC = VisionSpec(frames=8, min_pixels=84 * 84, max_pixels=84 * 84)
IGNORED = -100


def warm_start(
    data: Path,
    out: Path,
    *,
    steps: int = 300,
    batch: int = 16,
    lr: float = 2e-3,
    wrong: float = 0.5,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Path:
    """Train from random weights and write `out`; the same seed and thread count give the same weights.

    `wrong` is the share of answers that are replaced by a random one of their kind; `on_step(step, steps, loss)`.
    """
    rng = random.Random(seed)
    config = read_config(HERE / "model")
    rows = read_rows(data)
    tokenizer = byte_tokenizer()
    make_prompt = PromptMaker(config, tokenizer, SPEC, clips_kept=1000)
    choices = {
        row.extra["kind"]: sorted({r.answer for r in rows if r.extra["kind"] == row.extra["kind"]}) for row in rows
    }
    model, views = random_model(config, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        samples = []
        for row in rng.sample(rows, batch):
            answer = rng.choice(choices[row.extra["kind"]]) if rng.random() < wrong else row.answer
            response = tokenizer.encode(answer_text(answer) + "<|im_end|>", add_special_tokens=False)
            samples.append((make_prompt(row), torch.tensor(response)))
        loss = response_loss(model, samples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1, steps, loss.item())
    save_weights(out, views, config)
    tokenizer.save_pretrained(out)
    return out


def random_model(config: dict[str, Any], seed: int) -> tuple[Any, dict[str, Tensor]]:
    """The architecture of `config` with random weights: normal, scaled by fan-in; norms 1, biases 0."""
    rng = torch.Generator().manual_seed(seed)
    model = build_model(config, torch.float32)
    views = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            views[name] = torch.randn(parameter.shape, generator=rng) * parameter[0].numel() ** -0.5
        else:
            views[name] = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0)
    views["model.language_model.embed_tokens.weight"].mul_(0.5)
    bind(model, views)
    return model, views


def response_loss(model: Any, samples: Sequence[tuple[Prompt, Tensor]]) -> Tensor:
    """Mean cross entropy of the response tokens, one padded batch; transformers' own forward."""
    longest = max(len(p.input_ids) + len(r) for p, r in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    positions = torch.zeros(3, len(samples), longest, dtype=torch.int64)
    for i, (prompt, response) in enumerate(samples):
        start, stop = len(prompt.input_ids), len(prompt.input_ids) + len(response)
        ids[i, :stop] = torch.cat([prompt.input_ids, response])
        labels[i, start - 1 : stop - 1] = response
        positions[:, i, :start] = prompt.position_ids
        positions[:, i, start:] = torch.arange(prompt.next_position, prompt.next_position + longest - start)
    hidden = model.model(
        input_ids=ids,
        position_ids=positions,
        pixel_values_videos=torch.cat([p.pixel_values for p, _ in samples if p.pixel_values is not None]),
        video_grid_thw=torch.cat([p.grid_thw for p, _ in samples if p.grid_thw is not None]),
        use_cache=False,
    ).last_hidden_state
    return cross_entropy(model.lm_head(hidden[labels != IGNORED]), labels[labels != IGNORED])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--wrong", type=float, default=0.5, help="share of answers replaced by a random one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    columns = (TextColumn("warm start"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=args.steps, loss=math.nan)
        out = warm_start(
            args.data,
            args.out,
            steps=args.steps,
            wrong=args.wrong,
            seed=args.seed,
            on_step=lambda step, _steps, loss: bar.update(task, completed=step, loss=loss),
        )
    print(f"model in {out}")


if __name__ == "__main__":
    main()
