"""What `rollplex calibrate` measured on a GPU: the rates of its work, and how decode and prefixes slow each other down.

measured.gemm_flops_per_s(4096)              6.1e14      linear layers on so many tokens at once
measured.step_s(16, 6000)                    0.0048      one decode step of 16 responses that have 6000 tokens each
measured.surface.beside(16, 6000, 80)        Beside(slower=1.55, rate=0.56)
    16 decode, prefixes run 6000 tokens at a time on 80 SMs: a decode step takes 1.55 times what it takes alone, prefix
    work goes on at 0.56 of its own rate

measured.exchange.sum_s(25_165_824)          0.0002      hidden states of 6144 tokens summed over the ranks of a trainer

A file is of one GPU type and one model shape, and refused for others (calibration_checks.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from rollplex.ir.curve import Curve, between
from rollplex.ir.errors import JobError, Problem
from rollplex.ir.job_section import Count, Positive, Section
from rollplex.ir.textfile import read_text

if TYPE_CHECKING:
    from rollplex.ir.job import Job

CALIBRATION_VERSION = 1
AGAIN = "rollplex calibrate JOB --out FILE"


class Shape(Section):
    """What of a job decides the rates: the language model's dimensions, and how engines cut it."""

    layers: Count = Field(description="layers of the language model")
    hidden: Count = Field(description="width of the hidden state")
    ffn: Count = Field(description="width of the feed-forward layer")
    heads: Count = Field(description="attention heads")
    kv_heads: Count = Field(description="KV heads")
    head_dim: Count = Field(description="width of a head")
    vocab: Count = Field(description="rows of the vocabulary")
    dtype: str = Field(description="of weights, activations and KV")
    train_tp: Count = Field(description="tensor-parallel degree of the policy's trainer, which runs prefixes")
    rollout_tp: Count = Field(description="tensor-parallel degree of its rollout engine, which decodes")

    @classmethod
    def of(cls, job: Job) -> Shape:
        """Of a job's policy."""
        names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
        return cls(
            **{name: getattr(job.spec, name) for name in names},
            dtype=job.model.dtype,
            train_tp=job.train_tp,
            rollout_tp=job.rollout_tp,
        )

    @property
    def gpus(self) -> int:
        """GPUs that are measured together: ranks that cut one model have one each."""
        return max(self.train_tp, self.rollout_tp)


class Rate(Section):
    """What one kind of kernel reaches on so many tokens."""

    tokens: Count = Field(description="tokens of one call")
    tflops: Positive = Field(description="TFLOP/s")


class Step(Section):
    """One decode step by itself."""

    batch: Count = Field(description="responses that decode")
    context: Count = Field(description="tokens that each has")
    seconds: Positive = Field(description="seconds of the step")


class Link(Section):
    """The link between HBM and pinned host memory."""

    to_device_gb_s: Positive = Field(description="host to HBM, GB/s")
    to_host_gb_s: Positive = Field(description="HBM to host, GB/s")
    both_gb_s: Positive = Field(description="each way while both are busy, GB/s")


class Pages(Section):
    """What memory management costs, seconds a GiB."""

    create_s: Positive = Field(description="physical pages made")
    map_s: Positive = Field(description="pages laid behind addresses, and made accessible")
    unmap_s: Positive = Field(description="pages let go")
    pin_s: Positive = Field(description="host memory registered for copies")


class Summed(Section):
    """Hidden states of some tokens, summed over the trainer's ranks, until each can go on with its next linear."""

    nbytes: Count = Field(description="bytes of a rank's part: all tokens")
    seconds: Positive = Field(description="seconds of the all-reduce, or of both of its halves")


class Exchange(Section):
    """What ranks exchanged while they were measured, each on a GPU of its own."""

    stretches: bool = Field(
        description="the trainer's ranks kept stretches of the tokens (sequence_parallel): reduce-scatter behind a "
        "linear, all-gather in front of the next; else they all-reduce"
    )
    sums: tuple[Summed, ...] = Field(default=(), description="with nothing beside, none of a trainer of TP 1")

    @model_validator(mode="after")
    def _once(self) -> Exchange:
        sizes = [row.nbytes for row in self.sums]
        if len(set(sizes)) < len(sizes):
            raise ValueError("a size stands there twice")
        return self

    def sum_s(self, nbytes: float) -> float:
        """Seconds of one sum, linear in bytes: below the smallest as long as that, above the largest at its rate."""
        rows = sorted(self.sums, key=lambda row: row.nbytes)
        sizes = [row.nbytes for row in rows]
        return between(sizes, [row.seconds for row in rows], nbytes) * max(1.0, nbytes / sizes[-1])


class AloneStep(Section):
    """A decode step with nothing beside it."""

    batch: Count = Field(description="responses that decode")
    seconds: Positive = Field(description="seconds of the step")


class AloneChunk(Section):
    """Prefix work with nothing beside it, on the whole GPU."""

    chunk_tokens: Count = Field(description="tokens of one forward")
    tokens_per_s: Positive = Field(description="tokens a second")


class CoRun(Section):
    """Decode and prefix work beside each other, as two clients of one MPS daemon."""

    batch: Count = Field(description="responses that decode")
    chunk_tokens: Count = Field(description="tokens of one prefix forward")
    sms: Count = Field(description="SMs that prefix work may use; all: no partition, as MPS schedules")
    step_s: Positive = Field(description="seconds of a decode step")
    tokens_per_s: Positive = Field(description="prefix tokens a second")


class Beside(NamedTuple):
    """What decode and prefix work are to each other: times its step alone, part of its rate alone."""

    slower: float
    rate: float


class Surface(Section):
    """The co-run surface: decode batch x prefix chunk x SMs; each way of running prefixes at each batch."""

    all_sms: Count = Field(description="SMs of the GPU: prefix work on all of them has no partition, as MPS schedules")
    context: Count = Field(description="tokens that each decoding response has")
    decode: tuple[AloneStep, ...] = Field(min_length=1, description="decode alone, a batch a row")
    prefix: tuple[AloneChunk, ...] = Field(min_length=1, description="prefixes alone, a chunk a row")
    rows: tuple[CoRun, ...] = Field(min_length=1, description="both")

    @model_validator(mode="after")
    def _whole(self) -> Surface:
        if problem := next(self._gaps(), ""):
            raise ValueError(problem)
        return self

    def _gaps(self) -> Iterator[str]:
        batches, chunks = sorted(row.batch for row in self.decode), sorted(row.chunk_tokens for row in self.prefix)
        for what, values in (("decode batch", batches), ("prefix chunk", chunks)):
            if len(set(values)) < len(values):
                yield f"a {what} stands there twice"
        for chunk, sms in sorted({(row.chunk_tokens, row.sms) for row in self.rows}):
            found = sorted(row.batch for row in self.rows if (row.chunk_tokens, row.sms) == (chunk, sms))
            if found != batches:
                yield f"chunks of {chunk} tokens on {sms} SMs were measured at batches {found}, decode at {batches}"
            if sms > self.all_sms:
                yield f"{sms} SMs of {self.all_sms}"
        for chunk in sorted({*chunks, *(row.chunk_tokens for row in self.rows)}):
            if chunk not in chunks:
                yield f"chunks of {chunk} tokens were not measured alone"
            if self.all_sms not in self.sms(chunk):
                yield f"chunks of {chunk} tokens were not measured without a partition, on all {self.all_sms} SMs"

    @property
    def batches(self) -> tuple[int, ...]:
        """Decode batches that were measured."""
        return tuple(sorted(row.batch for row in self.decode))

    def sms(self, chunk_tokens: int) -> tuple[int, ...]:
        """SM counts that chunks of this length were measured on."""
        return tuple(sorted({row.sms for row in self.rows if row.chunk_tokens == chunk_tokens}))

    def whole(self, tokens: float) -> int | None:
        """The measured chunk that stands for a prompt of so many tokens, run whole; None where none is near."""
        chunk = min((row.chunk_tokens for row in self.prefix), key=lambda chunk: (abs(chunk - tokens), chunk))
        return chunk if max(chunk, tokens) <= NEAR * min(chunk, tokens) else None

    def beside(self, batch: float, chunk_tokens: int, sms: float) -> Beside:
        """At a decode batch, with prefix chunks of a measured length: linear in SMs and in the logarithm of the batch.

        The ends of what was measured go on beyond it; all SMs are no partition, and no line leads to them. A step
        beside others takes no less than alone.
        """
        counts = tuple(n for n in self.sms(chunk_tokens) if (n == self.all_sms) == (sms == self.all_sms))
        slower, rates = zip(*(self._at(batch, chunk_tokens, count) for count in counts), strict=True)
        return Beside(max(1.0, between(counts, slower, sms)), between(counts, rates, sms))

    def _at(self, batch: float, chunk_tokens: int, sms: int) -> Beside:
        slower, rate = self._curves[chunk_tokens, sms]
        return Beside(slower(batch), rate(batch))

    @cached_property
    def _curves(self) -> dict[tuple[int, int], tuple[Curve, Curve]]:
        """By chunk and SMs, over the batch: decode's slowdown, and the rate of such chunks against theirs alone."""
        alone = {row.batch: row.seconds for row in self.decode}
        rate = {row.chunk_tokens: row.tokens_per_s for row in self.prefix}
        found: dict[tuple[int, int], tuple[Curve, Curve]] = {}
        for key in {(row.chunk_tokens, row.sms) for row in self.rows}:
            rows = [row for row in self.rows if (row.chunk_tokens, row.sms) == key]
            slower = Curve.of((row.batch, row.step_s / alone[row.batch]) for row in rows)
            found[key] = slower, Curve.of((row.batch, row.tokens_per_s / rate[row.chunk_tokens]) for row in rows)
        return found


NEAR = 1.25
"""A measured chunk stands for prompts up to a quarter longer or shorter: their kernels are alike."""


class Calibration(Section):
    """What was measured on GPUs of one type for one model shape; `rollplex calibrate` writes it."""

    schema_version: Literal[1] = Field(default=CALIBRATION_VERSION, description="of this form")
    gpu: str = Field(description="GPU type, as jobs name it")
    device: str = Field(description="the GPU's own name")
    versions: dict[str, str] = Field(description="of driver, CUDA, torch and Rollplex")
    shape: Shape = Field(description="the model and how engines cut it")
    gemm: tuple[Rate, ...] = Field(min_length=1, description="linear layers of a training rank, by tokens")
    attention: tuple[Rate, ...] = Field(min_length=1, description="causal attention of a training rank, by tokens")
    decode: tuple[Step, ...] = Field(min_length=1, description="steps of a rollout rank, every batch at every context")
    hbm_gb_s: Positive = Field(description="bytes read and written by a copy inside HBM, GB/s")
    link: Link = Field(description="the host link")
    pages: Pages = Field(description="memory management")
    exchange: Exchange | None = Field(
        default=None, description="what ranks exchanged meanwhile; none where each measured by itself, on one GPU"
    )
    surface: Surface | None = Field(default=None, description="decode and prefix work beside each other")

    @model_validator(mode="after")
    def _of_ranks(self) -> Calibration:
        if self.exchange and self.shape.gpus == 1:
            raise ValueError("exchange: one rank exchanges nothing")
        if self.exchange and bool(self.exchange.sums) != (self.shape.train_tp > 1):
            raise ValueError(f"exchange.sums: {len(self.exchange.sums)} of a trainer of TP {self.shape.train_tp}")
        return self

    def gemm_flops_per_s(self, tokens: float) -> float:
        """FLOP/s of linear layers on so many tokens."""
        return 1e12 * Curve.of((r.tokens, r.tflops) for r in self.gemm)(tokens)

    def attention_flops_per_s(self, tokens: float) -> float:
        """FLOP/s of causal attention over so many tokens."""
        return 1e12 * Curve.of((r.tokens, r.tflops) for r in self.attention)(tokens)

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step: linear in the context and in the logarithm of the batch, as far as was measured."""
        contexts = sorted({row.context for row in self.decode})
        return between(contexts, [self._steps[c](batch) for c in contexts], context)

    @cached_property
    def _steps(self) -> dict[int, Curve]:
        contexts = {row.context for row in self.decode}
        return {c: Curve.of((row.batch, row.seconds) for row in self.decode if row.context == c) for c in contexts}

    @property
    def most_batch(self) -> int:
        """The largest decode batch that was measured."""
        return max(row.batch for row in self.decode)

    @cached_property
    def digest(self) -> str:
        """Names the content: a plan tells by it which file it rests on. One of one GPU is named as ever."""
        known = self.model_dump_json(exclude=None if self.exchange else {"exchange"})
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"


def read_calibration(path: Path) -> Calibration:
    """The file that `rollplex calibrate` wrote; JobError with everything that is wrong with it."""
    try:
        data = json.loads(read_text(path))
    except OSError as err:
        raise JobError(f"cannot read the calibration {path}: {err.strerror}", hint=AGAIN) from None
    except (ValueError, RecursionError) as err:
        raise JobError(f"the calibration {path} is not JSON: {err}", hint=AGAIN) from None
    return parse_calibration(data, str(path))


def parse_calibration(data: Any, name: str) -> Calibration:
    """The calibration of parsed JSON; JobError."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != CALIBRATION_VERSION:
        what = f"schema_version {version!r}, this Rollplex reads {CALIBRATION_VERSION}" if version else "no calibration"
        raise JobError(f"{name}: {what}", hint=f"a file written by `{AGAIN}`")
    try:
        return Calibration.model_validate(data)
    except ValidationError as err:
        wrong = err.errors(include_url=False)[:20]
        raise JobError(
            *(Problem(f"{name}: {'.'.join(map(str, e['loc']))}: {e['msg']}", hint=AGAIN) for e in wrong)
        ) from None
