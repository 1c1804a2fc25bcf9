"""How long compiling takes: whole commands in fresh processes, and how it grows with graph and cluster.

    python -m benchmarks.compile --repeat 5 --out benchmarks/results/compile.md

wall     a fresh process, imports included: median of n
graph    k more terms in the loss, each with its own frozen role's score once it has one: exponent of seconds over k
ranks    8 to 4096 GPUs of identical nodes, with prompts so that a rank's work stays the same
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.page import command, measured_with, table
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.passes.pipeline import compile_plan

ROOT = Path(__file__).resolve().parent.parent
GRPO = "examples/grpo.py"
NODE, CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
LARGE = "benchmarks/qwen3_vl_235b_h200x1024.yaml"
WALL = (("Qwen2.5-VL-32B, 32 H800", CLUSTER, 3.0), ("Qwen3-VL-235B-A22B, 1024 H200", LARGE, 10.0))
TERMS, GPUS = (1, 2, 4, 8, 16, 32, 64), (8, 32, 128, 512, 2048, 4096)


def wall_s(job: str) -> tuple[float, int]:
    """Seconds of one `rollplex compile` in a fresh process, and its exit status: 0 fits, 1 does not."""
    command = [sys.executable, "-m", "rollplex.cli", "compile", GRPO, "--job", job, "-o", os.devnull]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return time.perf_counter() - began, done.returncode


def with_terms(k: int) -> str:
    """GRPO's file with k more terms in its loss."""
    text = (ROOT / GRPO).read_text()
    more = "".join(f"    delta = delta + {1 / (i + 2):.4f} * torch.tanh(logp * ref_logp)\n" for i in range(k))
    return text.replace("    loss =", more + "    loss =")


def compile_s(algorithm: str | Path, job: str, *overrides: str, repeat: int) -> tuple[float, int]:
    """Median seconds of compiling in this process, without imports, and the nodes of the plan's graph."""
    loaded = load_algorithm(algorithm)
    found, nodes = [], 0
    for _ in range(repeat):
        began = time.perf_counter()
        plan = compile_plan(loaded, load_job(ROOT / job, overrides))
        found.append(time.perf_counter() - began)
        nodes = len(plan.graph)
    return statistics.median(found), nodes


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of log y over log x, least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mx, my = statistics.mean(xs), statistics.mean(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def rows(repeat: int) -> list[str]:
    """The report, a line each."""
    jobs = []
    for name, job, most in WALL:
        found = [wall_s(job) for _ in range(repeat)]
        seconds, fits = [s for s, _ in found], "fits" if found[0][1] == 0 else "does not fit"
        jobs.append((name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}", f"<= {most:g}", fits))
    lines = ["", *table(("job", "wall s, median", "least", "asked", "verdict"), jobs)]
    points, losses = [], []
    with tempfile.TemporaryDirectory() as folder:
        for k in TERMS:
            file = Path(folder) / f"terms{k}.py"
            file.write_text(with_terms(k))
            seconds, nodes = compile_s(file, NODE, repeat=repeat)
            points.append((float(nodes), seconds))
            losses.append((str(k), str(nodes), f"{seconds:.3f}"))
    lines += ["", *table(("loss terms", "graph nodes", "s"), losses)]
    lines += ["", f"seconds grow as nodes to the power {exponent(points):.2f} (at most 1 is asked)"]
    spread, clusters = [], []
    for gpus in GPUS:
        overrides = (f"cluster.nodes={gpus // 8}", f"workload.prompts={gpus}")
        seconds, _ = compile_s(ROOT / GRPO, NODE, *overrides, repeat=repeat)
        spread.append((float(gpus), seconds))
        clusters.append((str(gpus), str(gpus), f"{seconds:.3f}"))
    lines += ["", *table(("GPUs", "prompts", "s"), clusters)]
    return [*lines, "", f"seconds grow as GPUs to the power {exponent(spread):.2f} (0 is asked)"]


def heading() -> list[str]:
    """Where and with what it was measured."""
    measured = measured_with("torch", "ortools", "pydantic", "networkx")
    return ["# Compile time", "", f"`{command()}`; {measured}"]


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    text = "\n".join([*heading(), *rows(asked.repeat)]) + "\n"
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
