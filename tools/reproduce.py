"""Print what was published beside what the compiler computes; exit 1 if any figure is off (`make numbers`).

model        Qwen2.5-VL-32B, parameters              33,452,718,336    33,452,718,336   ok
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from rollplex import api
from rollplex.ir.hardware import load_gpu
from rollplex.ir.models import load_model
from rollplex.ir.plan import Plan, Times

sys.path.insert(0, str(Path(__file__).resolve().parent))

import published as p

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
X8 = "qwen2_5_vl_32b_h800x8.yaml"


@dataclass(frozen=True)
class Row:
    """One figure: published, computed, whether they agree, and what a reader should know."""

    section: str
    what: str
    published: str
    computed: str
    agrees: bool
    note: str = ""
    shape: bool = False

    @property
    def verdict(self) -> str:
        """`shape`: on the published side of 1, but not in the published range."""
        return "OFF" if not self.agrees else "shape" if self.shape else "ok"


@lru_cache(maxsize=64)
def plan(*overrides: str, job: str = X8, algorithm: str = "grpo.py") -> Plan:
    """The plan of an example job with overrides."""
    return api.compile_files(str(ROOT / "examples" / algorithm), ROOT / "examples/jobs" / job, overrides).plan


def near(value: float, want: float, tolerance: float) -> bool:
    """Within a share of the published figure."""
    return abs(value - want) <= tolerance * want


# ---- sections


def models() -> Iterator[Row]:
    """Exact totals, GiB to two decimals, KV bytes of a token."""
    for name, (parameters, gib, kv) in p.MODELS.items():
        spec = load_model(name)
        total = spec.parameters
        yield Row("models", f"{name}, parameters", f"{parameters:,}", f"{total:,}", total == parameters)
        computed = round(2 * total / GIB, 2)
        yield Row("models", f"{name}, GiB in bf16", f"{gib:.2f}", f"{computed:.2f}", computed == gib)
        token = spec.kv_bytes_per_token()
        yield Row("models", f"{name}, KV bytes a token", f"{kv:,}", f"{token:,}", token == kv)
    language = load_model("Qwen2.5-VL-32B").language_parameters
    agrees = language == p.LANGUAGE_32B
    yield Row("models", "Qwen2.5-VL-32B, language model", f"{p.LANGUAGE_32B:,}", f"{language:,}", agrees)


def gpus() -> Iterator[Row]:
    """Data sheets, and what software sees of the memory."""
    for name, (*sheet, usable) in p.GPUS.items():
        gpu = load_gpu(name)
        have = [gpu.hbm_gb, gpu.bandwidth_tb_s, gpu.tflops_bf16, gpu.nvlink_gb_s, gpu.pcie_gb_s, gpu.sms]
        yield Row("GPUs", f"{name}, data sheet", _figures(sheet), _figures(have), have == sheet)
        if usable is not None:
            agrees = round(gpu.usable_gib, 1) == usable
            yield Row("GPUs", f"{name}, GiB that software sees", f"{usable}", f"{gpu.usable_gib:.1f}", agrees)


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{v:g}" for v in values)


def table_1() -> Iterator[Row]:
    """The naive overlap, object by object, GiB a GPU."""
    held = {o.name: o.bytes / GIB for o in plan("schedule=naive").summary.objects}
    held["*.boundary"] = sum(v for name, v in held.items() if name.endswith(".boundary"))
    for name, (title, paper, arithmetic, tolerance) in p.TABLE_1.items():
        want = paper if arithmetic is None else arithmetic
        told = f"{paper:.1f}" if arithmetic is None else f"{paper:.1f}; arithmetic {arithmetic:.2f}"
        agrees = near(held[name], want, tolerance)
        note = f"{100 * (held[name] / paper - 1):+.1f} % of the paper's" if arithmetic is None else ""
        yield Row("Table 1", title, told, f"{held[name]:.2f}", agrees, note)
    total = sum(held[name] for name in p.TABLE_1)
    low, high = p.TABLE_1_TOTAL
    paper = total - held["train.activations"] + p.TABLE_1["train.activations"][1]
    note = f"{paper:.2f} with the paper's activations"
    yield Row("Table 1", "total of these rows", "about 165; 166-168", f"{total:.2f}", low <= total <= high, note)
    rest = plan("schedule=naive").summary.peak_hbm_bytes / GIB - total
    note = "vision towers, CUDA contexts and NCCL buffers, which the paper leaves out"
    yield Row("Table 1", "beside them", "-", f"{rest:.2f}", True, note)


def layout() -> Iterator[Row]:
    """Coverage of the three cases over the language model, and the buffer of case 3."""
    found = plan().summary.layout
    total = sum(c.params for c in found.cases.values())
    for case, (billions, percent, paper) in p.LAYOUT.items():
        params = found.cases[case].params
        share = 100 * params / total
        agrees = round(params / 1e9, 3) == billions and round(share, 2) == percent
        told = f"{billions} B = {percent} %; paper {paper} %"
        yield Row("layout", f"case {case}", told, f"{params / 1e9:.3f} B = {share:.2f} %", agrees)
    buffer = found.case3_buffer_bytes / GIB
    told = f"{p.CASE3_BUFFER_GIB}; paper {p.PAPER_BUFFER_GIB}"
    yield Row("layout", "case-3 buffer, GiB a GPU", told, f"{buffer:.2f}", round(buffer, 2) == p.CASE3_BUFFER_GIB)
    smaller = 100 * (1 - buffer / p.TABLE_1["actor.snapshot"][1])
    agrees = abs(smaller - p.SMALLER_THAN_A_SHARD) < 0.5
    what = "smaller than a second TP-8 shard of 7.6 GiB, %"
    yield Row("layout", what, f"{p.SMALLER_THAN_A_SHARD}", f"{smaller:.1f}", agrees)


def figure_8() -> Iterator[Row]:
    """The full schedule and four ablations, at the whole prompt budget and at the paper's median prompts."""
    full = int(plan().job["workload"]["prompt_tokens"])
    for tokens in (full, *reversed(p.MEDIAN_PROMPTS)):
        budget = f"workload.prompt_tokens={tokens}"
        found = plan(budget).summary
        computed = f"peak {found.peak_hbm_bytes / GIB:.1f} in {found.peak_window}"
        below = plan(budget).feasible
        yield Row("Figure 8", f"{tokens} tokens, full schedule", "below 80 GB", computed, below)
        for mechanism, (phase, says) in p.FIGURE_8.items():
            yield _ablation(mechanism, phase, says, tokens, budget)


def _ablation(mechanism: str, phase: str, says: str, tokens: int, budget: str) -> Row:
    what = f"{tokens} tokens, no {mechanism.replace('_', ' ')}"
    found = plan(budget, f"ablate=[{mechanism}]").infeasible
    if found is None:
        return Row("Figure 8", what, f"over {says}", "fits", False)
    computed = f"over by {found.shortfall_bytes / GIB:.1f} in {found.window}"
    return Row("Figure 8", what, f"over {says}", computed, found.window.startswith(phase))


def times() -> Iterator[Row]:
    """Ratios of predicted times at median lengths: on the right side of 1; seconds and sizes are a roofline's."""
    note = "shape only: data-sheet rates know no video decoding, no framework"
    found = [_ratios(*lengths) for lengths in zip(p.MEDIAN_PROMPTS, p.MEDIAN_RESPONSES, strict=True)]
    for what, (least, most) in p.TIMES.items():
        values = sorted(ratios[what] for ratios in found)
        apart = values[-1] < least or values[0] > most
        computed = " to ".join(f"{v:.2f}" for v in values)
        yield Row("times", what, f"{least:.2f} to {most:.2f}", computed, values[0] > 1, note if apart else "", apart)


def anchors() -> Iterator[Row]:
    """Bytes of training state a parameter: weights, gradients, master weights, moments."""
    job, _ = p.X32
    for what, overrides, published in (
        ("Megatron", (), p.STATE_BYTES),
        (
            "Megatron, distributed optimizer over 4 ranks",
            ("roles.actor.train.distributed_optimizer=true",),
            p.CUT_BYTES,
        ),
    ):
        objects = {o.name: o.bytes for o in plan("schedule=naive", *overrides, job=job).summary.objects}
        state = sum(objects[f"actor.{name}"] for name in ("snapshot", "gradients", "master", "moments"))
        found = state / (objects["actor.gradients"] / 4)
        yield Row(
            "anchors", f"{what}, bytes a parameter", f"{published:g}", f"{found:.2f}", near(found, published, 1e-3)
        )


def _ratios(prompt: int, response: int) -> dict[str, float]:
    job, apart = p.X32
    median = (f"workload.prompt_median={prompt}", f"workload.response_median={response}")

    def of(*overrides: str) -> Times:
        return plan(*median, *overrides, job=job).summary.times

    ours, wide = of(), of("roles.actor.rollout.tensor_parallel=8")
    found = {
        "step, serial over rollplex": of("schedule=serial").step_s / ours.step_s,
        "step, disaggregated over rollplex": of(*apart).step_s / ours.step_s,
        "rollout, TP 8 over TP 4": wide.decode_s / ours.decode_s,
        "step, rollout TP 8 over TP 4": wide.step_s / ours.step_s,
    }
    tails = {"partial rollout": "kind: partial, share: 0.8", "oversampling": "kind: oversample, factor: 1.25"}
    for name, tail in tails.items():
        cut = f"workload.rollout={{{tail}}}"
        found[f"step, serial over rollplex, {name}"] = of(cut, "schedule=serial").step_s / of(cut).step_s
    return found


SECTIONS = (models, gpus, table_1, layout, figure_8, anchors, times)


def rows() -> Iterator[Row]:
    """All figures, section by section."""
    for section in SECTIONS:
        yield from section()


def main() -> int:
    """Print the table."""
    off = 0
    for section, group in groupby(rows(), key=lambda r: r.section):
        found = list(group)
        widths = [max(len(getattr(r, key)) for r in found) for key in ("what", "published", "computed")]
        print(f"\n{section:<{widths[0] + 2}}{'published':<{widths[1] + 2}}computed")
        for r in found:
            cells = "  ".join(f"{c:<{w}}" for c, w in zip((r.what, r.published, r.computed), widths, strict=True))
            print(f"{cells}  {r.verdict}{'  ' + r.note if r.note else ''}", flush=True)
            off += not r.agrees
    print(f"\n{off} figures are off" if off else "\nno figure is off")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
