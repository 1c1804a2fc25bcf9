"""Weights of a Hugging Face directory: read straight into the caller's memory, written so that transformers loads them.

    final/config.json
    final/model.safetensors                                        up to 1 GiB
    final/model-00001-of-00008.safetensors ..                      more: as many files as are written at a time,
    final/model.safetensors.index.json                             and which has what

On disk Qwen2.5-VL keeps its old names (`visual.`, `model.layers.`); in memory they are named_parameters() of
transformers 5 (`model.visual.`, `model.language_model.layers.`). Both are read, the old ones are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollplex.backends.tensorfile import Blocks, Shapes, header, shapes_of
from rollplex.ir.errors import JobError, Problem

AT_A_TIME = 8
"""Threads that read or write: one alone is bound by its core, at 1 to 2 GB/s."""
FILE_BYTES = 1 << 30


def load_weights(directory: str | Path, views: Mapping[str, Tensor]) -> None:
    """Copy every tensor of the directory's safetensors files into the view of its name, cast to the view's dtype.

    JobError lists all missing names and wrong shapes at once; a tied model needs no head. Names that no view has are
    ignored (a checkpoint may hold more).
    """
    with opened(directory) as files, copying() as copy:
        where = places(directory, files)
        problems = [Problem(f"no tensor {name}", str(directory)) for name in sorted(views.keys() - where.keys())]
        for name in views.keys() & where.keys():
            file, key = where[name]
            problems += _copied(copy, views[name], files[file].get_tensor(key), name, file)
    if problems:
        raise JobError(*problems[:20])


def places(directory: str | Path, files: Mapping[Path, Any]) -> dict[str, tuple[Path, str]]:
    """The file and the key of each tensor by its name in memory; JobError where two files have one.

    They may be what is left of an older model beside a newer one, and nothing says which is meant.
    """
    found: dict[str, tuple[Path, str]] = {}
    for file, one in files.items():
        for key in one.keys():  # noqa: SIM118 (not a dict)
            other, _ = found.setdefault(memory_name(key), (file, key))
            if other != file:
                what = f"{key} is in {other.name} and in {file.name}"
                raise JobError(what, where=directory, hint="leave the files of one model there")
    return found


@contextmanager
def opened(directory: str | Path) -> Iterator[dict[Path, Any]]:
    """The safetensors files of a directory, mapped: a tensor is read when it is copied. JobError, as all here."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise JobError("no .safetensors file here", where=directory, hint="save the model with save_pretrained")
    where: Path | str = directory
    with ExitStack() as stack:
        try:
            found = {}
            for where in files:
                found[where] = stack.enter_context(safe_open(str(where), framework="pt"))
            where = directory  # from here on any of them may be at fault
            yield found
        except (SafetensorError, OSError) as err:
            raise JobError(f"cannot read the weights: {err}", where=where) from None


@contextmanager
def copying() -> Iterator[Callable[[Tensor, Tensor], None]]:
    """`copy(into, source)` from a file that is mapped, several at a time; all are done when the block ends."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        jobs: list[Future[Tensor]] = []
        yield lambda into, source: jobs.append(pool.submit(into.detach().copy_, source))
        for job in jobs:
            job.result()


def save_weights(directory: str | Path, views: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write config.json and the weights; `from_pretrained(directory)` of transformers reads them."""
    write_model(directory, shapes_of(views), views.__getitem__, config)


def write_model(
    directory: str | Path, shapes: Shapes, read: Callable[[str], Tensor], config: Mapping[str, Any]
) -> None:
    """`save_weights` of tensors that `read` makes when they are written; from several threads."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(shapes.values()))[0]).removeprefix("torch.")
    written = {**config, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    files = _files(shapes)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for done in [pool.submit(_write, folder / file, part, read) for file, part in files.items()]:
            done.result()
    if len(files) > 1:
        places = {disk_name(name): file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": _nbytes(shapes)}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def memory_name(key: str) -> str:
    """`visual.x` and `model.layers.x` as named_parameters() calls them; newer names stay."""
    if key.startswith(("model.visual.", "model.language_model.", "lm_head.", "score.")):
        return key
    if key.startswith("visual."):
        return f"model.{key}"
    return "model.language_model." + key.removeprefix("model.")


def disk_name(name: str) -> str:
    """The inverse of `memory_name`."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def _copied(
    copy: Callable[[Tensor, Tensor], None], view: Tensor, value: Tensor, name: str, file: Path
) -> list[Problem]:
    if view.shape != value.shape:
        return [Problem(f"{name} is {list(value.shape)}, the config says {list(view.shape)}", str(file))]
    copy(view, value)
    return []


def _files(shapes: Shapes) -> dict[str, Shapes]:
    """Which tensors each file has: one file, or about equal ones, tensors in their order."""
    count = min(AT_A_TIME, -(-_nbytes(shapes) // FILE_BYTES)) or 1
    share, parts, at = -(-_nbytes(shapes) // count), list[dict[str, Any]](), 0
    for name, (dtype, shape) in shapes.items():
        if at >= share * len(parts):
            parts.append({})
        parts[-1][name] = (dtype, shape)
        at += prod(shape) * dtype.itemsize
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, start=1)}


def _nbytes(shapes: Shapes) -> int:
    return sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())


def _write(path: Path, shapes: Shapes, read: Callable[[str], Tensor]) -> None:
    blocks = Blocks()
    with path.open("wb") as out:
        out.write(header({disk_name(name): row for name, row in shapes.items()}, {"format": "pt"}))
        for name in shapes:
            for block in blocks.of(read(name)):
                out.write(block)
