"""Write docs/passes.md from the docstrings of the passes, so that the page says what the code says of itself.

python tools/pass_reference.py            write the page
python tools/pass_reference.py --check    exit 1 when the page is not up to date
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from rollplex.passes.base import Pass
from rollplex.passes.pipeline import default_pipeline

PAGE = Path(__file__).resolve().parent.parent / "docs/passes.md"

HEAD = """# Passes

The compiler is a list of passes over one *module*: the graph, the job, and *facts*. A pass is a frozen dataclass whose
fields are its options; `run(module)` gives a new module and changes nothing in place. What it learns is a fact, a
frozen dataclass that prints itself; another pass reads it as `module[Layout]`, and if it is not there yet the error
names the pass that makes it. After every pass the graph is verified, and at the end the checker replays the plan.

    rollplex passes                                the list, with those of installed packages where they stand
    rollplex compile .. --print-after PASS         the graph and the fact after a pass, or after `all`
    rollplex compile .. --passes ..layout          run the passes up to one, and print what it left
    rollplex compile .. --passes layout,lifetimes  run these, in this order
    rollplex compile .. --passes=-NAME             leave one out; refused where another needs its fact, which it names
    rollplex compile .. --time                     seconds of each pass, of imports and tracing, and the solvers' part

`layout`, `residency` and `chunk-sizes` are CP-SAT models. Their files begin with data, variables, constraints and
objectives; the code uses the same letters and numbers. Objectives are solved in order, each fixed before the next:
residency takes the least bytes over a capacity (zero for what fits), then the least exposed time, then the least peak,
then the fewest bytes moved. One worker, a fixed seed and a deterministic limit make plans repeat, byte for byte. A
result carries value, bound and status; *infeasible* and *out of time* are different outcomes, and where the limit ends
a solve early the best solution so far stands, `feasible`, with its bound. Sizes come from the engines: a backend's
`facts.py` says how it orders fused weights and what its work needs in memory, as arithmetic on the model's shape.

The constraints of a model are a table of numbered families (`FAMILIES`). `tests/oracles/` has every solver's maths once
more, by enumeration; `tests/test_families.py` compares the two on random instances, takes away each family and swaps
every two neighbouring objectives, to see that a test notices. `python tools/families.py` prints which and how.

A job may leave degrees to the compiler: `tensor_parallel: auto`, for any engine. The file then stands for several jobs,
one for every choice that the static rules let pass. A choice whose weights alone exceed a GPU is refused unseen, all
others are compiled; the least predicted step wins, then the lower peak, then the smaller degrees. `summary.degrees` of
the plan holds the choice, `summary.runners_up` the others.

[CONTRIBUTING.md](../CONTRIBUTING.md) has the recipe for a pass, here or in a package of your own. This page is made by
`python tools/pass_reference.py` from the passes' docstrings.
"""


def page() -> str:
    """The head, a table of all passes, and a section for each."""
    passes = default_pipeline()
    rows = "".join(f"| `{p.name}` | `{p.makes.__name__}` | {what(p)} |\n" for p in passes)
    table = f"\n| pass | makes | what it does |\n| --- | --- | --- |\n{rows}"
    return HEAD + table + "".join(f"\n{section(p)}" for p in passes)


def section(p: Pass) -> str:
    """What a pass does, its facts and options, and the docstring of its file."""
    return "\n\n".join([f"## {p.name}", *paragraphs(p), f"```text\n{module_text(p)}\n```"]) + "\n"


def paragraphs(p: Pass) -> Iterator[str]:
    """The class docstring, then the facts and options that the class states."""
    yield from (" ".join(text.split()) for text in inspect.cleandoc(p.__doc__ or "").split("\n\n"))
    needs = ", ".join(f"`{fact.__name__}`" for fact in p.needs) or "nothing but the graph and the job"
    yield f"Needs {needs}. Makes `{p.makes.__name__}`: {summary(p.makes)} {options(p)}"


def options(p: Pass) -> str:
    """The fields of the pass with their defaults."""
    assert dataclasses.is_dataclass(p)
    fields = [f"`{f.name}` (`{f.default}`)" for f in dataclasses.fields(p)]
    return f"Options: {', '.join(fields)}." if fields else "No options of its own."


def what(p: Pass) -> str:
    """The first sentence of a pass's docstring, for the table."""
    return " ".join(inspect.cleandoc(p.__doc__ or "").partition("\n\n")[0].split()).replace("|", "or")


def summary(fact: type) -> str:
    """The first paragraph of a fact's docstring."""
    return " ".join(inspect.cleandoc(fact.__doc__ or "").partition("\n\n")[0].split())


def module_text(p: Pass) -> str:
    """The docstring of the file that the pass is in."""
    return inspect.cleandoc(sys.modules[type(p).__module__].__doc__ or "")


def main() -> None:
    """Write the page, or compare."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/passes.md is not up to date: run python tools/pass_reference.py")


if __name__ == "__main__":
    main()
