"""Reference tables: the models and the GPUs that are built in, and the passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from rollplex.ir.hardware import Gpu
from rollplex.ir.models import ModelSpec
from rollplex.ir.stopwatch import Stage
from rollplex.show.text import joined, line, table


def models_table(specs: Iterable[ModelSpec]) -> list[Text]:
    """Dimensions, exact parameters, GiB in bf16, and bytes of a token's KV cache at TP=1."""
    head = ("model", "hidden/layers/heads/kv/ffn/vocab", "vision", "parameters", "GiB", "KV")
    rows = [head, *(_model_row(spec) for spec in specs)]
    note = "GiB: all parameters in bf16   KV: bytes of a token at TP=1, bf16   vision: width/depth/heads/ffn"
    return [*_headed(table(rows, right=(3, 4, 5), gap=1)), line((note, "dim"))]


def _model_row(spec: ModelSpec) -> tuple[str, ...]:
    ffn = f"{spec.moe.experts}x{spec.moe.ffn} top-{spec.moe.per_token}" if spec.moe else str(spec.ffn)
    shape = "/".join(map(str, (spec.hidden, spec.layers, spec.heads, spec.kv_heads, ffn, spec.vocab)))
    v = spec.vision
    vision = f"{v.hidden}/{v.depth}/{v.heads}/{v.ffn}" if v else "-"
    gib, kv = f"{spec.parameters * 2 / 2**30:.2f}", f"{spec.kv_bytes_per_token():,}"
    return (spec.name, shape + (" tied" if spec.tied else ""), vision, f"{spec.parameters:,}", gib, kv)


def gpus_table(gpus: Iterable[Gpu]) -> list[Text]:
    """Data-sheet figures, and the memory that software can use with where that figure comes from."""
    head = ("GPU", "usable GiB", "GB", "TB/s", "TFLOP/s", "NVLink", "PCIe", "SMs", "usable memory is")
    rows = [head, *(_gpu_row(gpu) for gpu in gpus)]
    note = "TFLOP/s: dense bf16   NVLink, PCIe: GB/s, both directions together"
    return [*_headed(table(rows, right=range(1, 8), gap=2)), line((note, "dim"))]


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    usable = "-" if gpu.capacity_from_job else f"{gpu.usable_gib:.1f}"
    figures = (gpu.hbm_gb, gpu.bandwidth_tb_s, gpu.tflops_bf16, gpu.nvlink_gb_s, gpu.pcie_gb_s, gpu.sms)
    return (gpu.name, usable, *(f"{f:g}" if f else "-" for f in figures), gpu.usable_source)


def passes_table(rows: Sequence[tuple[str, str, str]], width: int) -> list[Text]:
    """(name, fact it makes, what it does), numbered in the order they run."""
    left = max(len(name) for name, _, _ in rows), max(len(fact) for _, fact, _ in rows)
    lines = [line((f"    {'pass':<{left[0]}}  {'makes':<{left[1]}}  what it does", "bold"))]
    for i, (name, fact, does) in enumerate(rows, 1):
        head = f"{i:>2}  {name:<{left[0]}}  {fact:<{left[1]}}  "
        wrapped = joined(does.split(), width - len(head), " ")
        lines += [line(head if k == 0 else " " * len(head), text) for k, text in enumerate(wrapped)]
    return lines


def plugins_table(rows: Sequence[tuple[str, str, str, str]]) -> list[Text]:
    """(group, name, package, problem): what installed packages add."""
    if not rows:
        return [line("no installed package adds a pass, an algorithm or an engine")]
    head = ("group", "name", "package", "state")
    return _headed(table([head, *((g, n, p, problem or "ok") for g, n, p, problem in rows)]))


def stages_table(stages: Sequence[Stage]) -> list[Text]:
    """Seconds of each stage of a command, and those of them that a solver ran."""
    total = Stage("total", sum(s.seconds for s in stages), sum(s.solver_s for s in stages))
    rows = [("", "seconds", "solver")]
    rows += [(s.name, f"{s.seconds:.3f}", f"{s.solver_s:.3f}" if s.solver_s else "") for s in (*stages, total)]
    return _headed(table(rows, right=(1, 2)))


def _headed(lines: list[str]) -> list[Text]:
    return [line((lines[0], "bold")), *(line(text) for text in lines[1:])]
