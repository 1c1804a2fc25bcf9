"""A short supervised start for the shapes example: the model learns to see and to answer in form, but not reliably.

python -m examples.shapes.warm_start DATA OUT

Post-training starts from a trained model. There is none of this size, so this makes one: it learns from right answers,
and at the end from answers of which most are drawn at random, as a model from unfiltered data would. It then knows more
than it says: sampled, it answers rightly less than half of the time. GRPO has something to raise. OUT is a Hugging Face
directory: config.json, model.safetensors, tokenizer.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.shapes.reward import answer_text
from rollplex.backends.data.encode import PromptMaker
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rows import Row, read_rows
from rollplex.backends.data.tokens import byte_tokenizer
from rollplex.backends.data.video import VisionSpec
from rollplex.backends.hf.model import bind, build_model, read_config
from rollplex.backends.training.weights import save_weights

HERE = Path(__file__).parent
SPEC = VisionSpec(frames=4, min_pixels=84 * 84, max_pixels=84 * 84)
IGNORED = -100
VIDEOS_A_STEP = 8
RISE_STEPS, DECAY_SHARE = 30, 0.7

Sample = tuple[Prompt, Tensor]


@dataclass(frozen=True)
class Course:
    """What is learned from: rows by video, and the answers there are to each kind of question."""

    videos: list[list[Row]]
    answers: dict[str, list[str]]
    make_prompt: PromptMaker
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, data: Path, config: dict[str, Any], tokenizer: Any) -> Course:
        """Read the rows of a JSONL file."""
        rows = read_rows(data)
        by_video: dict[Path | None, list[Row]] = {}
        for row in rows:
            by_video.setdefault(row.video, []).append(row)
        kinds = sorted({row.extra["kind"] for row in rows})
        answers = {kind: sorted({row.answer for row in rows if row.extra["kind"] == kind}) for kind in kinds}
        maker = PromptMaker(config, tokenizer, SPEC, clips_kept=1000)
        return cls(list(by_video.values()), answers, maker, lambda t: tokenizer.encode(t, add_special_tokens=False))

    def batch(self, rng: random.Random, wrong: float) -> list[list[Sample]]:
        """All questions of some videos with their responses, a share `wrong` of the answers drawn at random."""
        return [list(self._samples(rng, rows, wrong)) for rows in rng.sample(self.videos, VIDEOS_A_STEP)]

    def _samples(self, rng: random.Random, rows: list[Row], wrong: float) -> Iterator[Sample]:
        for row in rows:
            answer = rng.choice(self.answers[row.extra["kind"]]) if rng.random() < wrong else row.answer
            yield self.make_prompt(row), torch.tensor(self.encode(answer_text(answer) + "<|im_end|>"))


def warm_start(
    data: Path,
    out: Path,
    *,
    steps: int = 600,
    unsure_steps: int = 60,
    wrong: float = 0.7,
    lr: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Path:
    """Train from random weights and write `out`; the same seed and thread count give the same weights.

    In the last `unsure_steps` a share `wrong` of the answers is drawn at random; `on_step(step, steps, loss)`.
    """
    rng = random.Random(seed)
    config, tokenizer = read_config(HERE / "model"), byte_tokenizer()
    course = Course.of(data, config, tokenizer)
    model, views = random_model(config, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / RISE_STEPS, (1 - step / steps) / DECAY_SHARE)
        loss = response_loss(model, course.batch(rng, wrong if step >= steps - unsure_steps else 0.0))
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


def response_loss(model: Any, videos: Sequence[Sequence[Sample]]) -> Tensor:
    """Mean cross entropy of the response tokens, one padded batch; each video goes through the tower once."""
    samples = [(i, prompt, response) for i, part in enumerate(videos) for prompt, response in part]
    longest = max(len(p.input_ids) + len(r) for _, p, r in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    positions = torch.zeros(3, len(samples), longest, dtype=torch.int64)
    for i, (_, prompt, response) in enumerate(samples):
        start, stop = len(prompt.input_ids), len(prompt.input_ids) + len(response)
        ids[i, :stop] = torch.cat([prompt.input_ids, response])
        labels[i, start - 1 : stop - 1] = response
        positions[:, i, :start] = prompt.position_ids
        positions[:, i, start:] = torch.arange(prompt.next_position, prompt.next_position + longest - start)
    seen = video_features(model, [part[0][0] for part in videos])[torch.tensor([i for i, _, _ in samples])]
    embedded = model.model.language_model.embed_tokens(ids)
    embedded = embedded.masked_scatter((ids == model.config.video_token_id)[..., None], seen)
    # A dict of no masks: right padding needs none, since nothing that counts looks to its right.
    hidden = model.model.language_model(
        inputs_embeds=embedded, position_ids=positions, attention_mask={"full_attention": None}, use_cache=False
    ).last_hidden_state
    return cross_entropy(model.lm_head(hidden[labels != IGNORED]), labels[labels != IGNORED])


def video_features(model: Any, prompts: Sequence[Prompt]) -> Tensor:
    """What the tower makes of videos of one size: [videos, tokens, hidden]."""
    pixels = torch.cat([p.pixel_values for p in prompts if p.pixel_values is not None])
    grids = torch.cat([p.grid_thw for p in prompts if p.grid_thw is not None])
    features = model.model.visual(pixels, grid_thw=grids).pooler_output
    return features.view(len(prompts), -1, features.shape[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--wrong", type=float, default=0.7, help="share of random answers at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more gain nothing at this size")
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
