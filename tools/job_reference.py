"""Write docs/jobs.md from the descriptions of the job's fields, so that the page says what the program accepts.

python tools/job_reference.py            write the page
python tools/job_reference.py --check    exit 1 when the page is not up to date
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollplex.ir.job import Job

PAGE = Path(__file__).resolve().parent.parent / "docs/jobs.md"

HEAD = """# Job reference

A job is a YAML file: the model, the machines, the roles' engines, and one step's work. This page is made by
`python tools/job_reference.py` from the program itself. Every key can be overridden on the command line, as
`section.key=value`:

    rollplex compile examples/grpo.py --job examples/jobs/qwen2_5_vl_32b_h800x8.yaml workload.prompts=64 schedule=serial

Unknown keys are refused, and all problems of a file are reported at once, each with its line. Sizes are numbers in the
unit of the key's name, or texts with a unit: `29`, `"48 MiB"`, `"1.4 TB"`. Paths are relative to the job file. Parallel
degrees may be `auto`: the compiler tries all legal ones, takes the best, and says how the others compare.

A whole example is [examples/jobs/qwen2_5_vl_32b_h800x8.yaml](../examples/jobs/qwen2_5_vl_32b_h800x8.yaml).
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n{section}" for section in sections())


def sections() -> Iterator[str]:
    """The top level first, then every section where it first appears, depth first."""
    todo: list[tuple[str, type[BaseModel]]] = [("", Job)]
    while todo:
        path, model = todo.pop(0)
        yield section(path, model)
        inner = [(f"{path}{name}", part) for name, f in model.model_fields.items() for part in models_in(f.annotation)]
        todo = [(f"{name}.{'<role>.' if part.__name__ == 'Role' else ''}", part) for name, part in inner] + todo


def section(path: str, model: type[BaseModel]) -> str:
    """A heading, the section's sentence, and a table of its keys."""
    title = f"`{path.removesuffix('.')}`" if path else "Top level"
    rows = [row(name, field) for name, field in model.model_fields.items()]
    doc = " ".join((model.__doc__ or "").split())
    return f"## {title}\n\n{doc}\n\n| key | value | default | meaning |\n| --- | --- | --- | --- |\n" + "".join(rows)


def row(name: str, field: FieldInfo) -> str:
    """One key."""
    default = "required" if field.is_required() else f"`{default_of(field)}`"
    return f"| `{name}` | {kind(field.annotation)} | {default} | {(field.description or '').replace('|', ',')} |\n"


def default_of(field: FieldInfo) -> str:
    """A default as YAML has it; a section's is its own defaults."""
    value = field.default if field.default is not PydanticUndefined else None
    if field.default_factory is not None:
        return "{}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def kind(annotation: Any) -> str:
    """A type in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(args[0])
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(a) for a in args if a is not type(None)))
    if origin is tuple:
        return "list of " + " and ".join(dict.fromkeys(kind(a) for a in args if a is not Ellipsis))
    if origin is dict:
        return "section" if models_in(annotation) else "map"
    return {int: "whole number", float: "number", str: "text", bool: "true, false"}.get(annotation, "section")


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Sections inside a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(m for a in get_args(annotation) for m in models_in(a))


def main() -> None:
    """Write the page, or compare."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/jobs.md is not up to date: run python tools/job_reference.py")


if __name__ == "__main__":
    main()
