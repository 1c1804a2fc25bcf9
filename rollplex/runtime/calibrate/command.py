"""`rollplex calibrate` but for the terminal: are the GPUs the job's, two processes on each, the file written whole.

calibrate(job, Path("h200.json"))     Path written; what was measured is written when it ends early, too
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rollplex import __version__
from rollplex.backends.cuda.machine import Card, cards, driver_version
from rollplex.backends.cuda.mps import Mps
from rollplex.backends.cuda.post import Post
from rollplex.ir.calibration import Calibration, Shape, read_calibration
from rollplex.ir.calibration_checks import stretches
from rollplex.ir.errors import JobError, RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import cuda_device
from rollplex.runtime.calibrate.grid import Grid
from rollplex.runtime.calibrate.measure import Measured, Measurement, Tell
from rollplex.runtime.calibrate.side import ProcessSide
from rollplex.runtime.calibrate.station import bench_command

SHARES = {"decode": 0.55, "prefix": 0.25}
"""Of the GPU's memory: keys and values of a large batch take most."""


def calibrate(
    job: Job, out: Path, seconds: float, quick: bool, tell: Tell, begin: Callable[[Grid], None]
) -> Calibration:
    """Measure and write `out`. `begin` hears what will be measured, `tell` every figure.

    JobError for a job that says nothing of a GPU, RunError without its GPU, EngineError where measuring fails. However
    it ends, what is whole by then is written.
    """
    check_job(job)
    check_place(out)
    gpu, devices = check_gpus(job, cards())
    with ExitStack() as stack:
        environment = {**os.environ, **stack.enter_context(Mps.running()).environment()}
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollplex-meeting-")))
        decode, prefix = (stack.enter_context(_side(job, name, devices, meeting, environment)) for name in SHARES)
        for side in (decode, prefix):
            side.wait()
        for facts in decode.facts:
            check_sms(job, facts["device"], facts["sms"])
        grid = Grid.of(job, decode.facts[0]["sms"], seconds, quick)
        begin(grid)
        measurement = Measurement(decode, prefix, grid, tell)
        with written(measurement.found, grid, gpu, job, decode.facts[0], out):
            measurement.run()
    return read_calibration(out)


@contextmanager
def written(found: Measured, grid: Grid, gpu: str, job: Job, facts: Mapping[str, Any], out: Path) -> Iterator[None]:
    """However the block ends, what is whole by then is in the file."""
    versions = {name: str(facts[name]) for name in ("torch", "cuda")}
    versions |= {"driver": driver_version(), "rollplex": __version__}
    try:
        yield
    finally:
        if found.rates_done:
            made = found.calibration(grid, gpu, Shape.of(job), stretches(job), facts["device"], versions)
            write_whole(out, made.to_json())


def _side(
    job: Job, name: str, devices: Sequence[int], meeting: Path, environment: dict[str, str]
) -> AbstractContextManager[ProcessSide]:
    commands = {post.gpu: bench_command(post) for post in posts(job, name, devices, meeting)}
    return ProcessSide.started(name, commands, environment)


def posts(job: Job, name: str, devices: Sequence[int], meeting: Path) -> Iterator[Post]:
    """The processes of a side: a rank on each device, as many as make up whole copies of the model."""
    decoding = name == "decode"
    tp = job.rollout_tp if decoding else job.train_tp
    for i, device in enumerate(devices[: len(devices) // tp * tp]):
        yield Post(
            shape=Shape.of(job),
            decoding=decoding,
            gpu=device,
            share=SHARES[name],
            tp=tp,
            rank=i % tp,
            meeting=str(meeting / f"{name}-{i // tp}"),
            stretches=not decoding and stretches(job),
        )


def check_job(job: Job) -> None:
    """Only jobs for GPUs, of dense models."""
    if job.on_host:
        raise JobError("cluster.gpu is cpu, and a GPU is calibrated", hint="cluster.gpu=H200, or the GPU at hand")
    if job.spec.moe is not None:
        what = f"{job.spec.name} has experts, and what stands for a model here has none"
        raise JobError(what, hint="predictions rest on data-sheet figures without a calibration")


def check_place(out: Path) -> None:
    """Found out before anything is measured."""
    if out.is_dir():
        raise RunError("it is a directory", where=f"--out {out}", hint=f"name a file: {out / 'gpu.json'}")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        hint = "name a file in a directory of yours"
        raise RunError(f"cannot write into {out.parent}", where=f"--out {out}", hint=hint)


def check_gpus(job: Job, found: Sequence[Card]) -> tuple[str, tuple[int, ...]]:
    """The job's GPU type, and the CUDA devices that its ranks are measured on; RunError where they are not here."""
    count = Shape.of(job).gpus
    devices = tuple(cuda_device(job, i) for i in range(count))
    told = ", ".join(map(str, devices))
    needs = f"TP {job.train_tp} trains and TP {job.rollout_tp} rolls out: {count} GPUs are measured together"
    if len(set(devices)) < count:
        hint = "leave run.devices out, or name a GPU once"
        raise RunError(f"{needs}, and run.devices names {told}: each rank has its own", where="run.devices", hint=hint)
    for device in devices:
        if found and device >= len(found):
            hint = "a machine with as many, run.devices, CUDA_VISIBLE_DEVICES, or a smaller tensor_parallel"
            what = f"{needs}, CUDA devices {told}, and CUDA sees {len(found)} here"
            raise RunError(what, where="GPU", hint=hint)
        check_gpu(job, found[device].name if found else "")
    return job.device.name, devices


def check_gpu(job: Job, found: str) -> str:
    """The job's GPU type, as it is called in the table of GPUs; RunError where this machine has another."""
    name = job.device.name
    if not found:
        raise RunError("this machine has no GPU that CUDA sees", where="GPU", hint="unset CUDA_VISIBLE_DEVICES")
    if not job.device.is_called(found):
        what = f"the job's GPU is {name}, this machine has {found}"
        raise RunError(what, where="cluster.gpu", hint=f"run on a machine with {name}, or state cluster.gpu")
    return name


def check_sms(job: Job, device: str, sms: int) -> None:
    """RunError where the GPU has other SMs than the table of GPUs says: plans would refuse what is measured there."""
    if sms != job.device.sms:
        what = f"{device} has {sms} SMs, the table of GPUs has {job.device.name} with {job.device.sms}"
        hint = "calibrate a whole GPU (no MIG slice), of the make that `rollplex gpus` lists"
        raise RunError(what, where="cluster.gpu", hint=hint)


def write_whole(path: Path, text: str) -> None:
    """The file is the old one or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as err:
        hint = f"what was measured is in {partial}" if partial.exists() else "name another file"
        raise RunError(f"cannot write the calibration: {err.strerror}", where=path, hint=hint) from None
