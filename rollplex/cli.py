"""The command line: one function a command; what it does is in `rollplex.api`, how it looks in `rollplex.show`.

Exit status: 0 feasible or done, 1 infeasible, refused by the checker, or a run that failed, 2 the input is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from rollplex import __version__, api, terminal
from rollplex.ir.errors import EngineError, OutOfMemory, PassError, RollplexError, RunError
from rollplex.ir.plan import Plan
from rollplex.ir.stopwatch import Stopwatch
from rollplex.listing import lists

if TYPE_CHECKING:
    from rollplex.passes.pipeline import OnPass, PassReport

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compile RL post-training of vision-language models to memory plans, check them, and run them.",
)

AlgorithmFile = Annotated[str, typer.Argument(metavar="ALGORITHM", help="FILE.py, FILE.py:NAME, or an installed NAME")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="overrides, as --set")]
JobFile = Annotated[Path, typer.Option("--job", "-j", help="the job, a YAML file")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write the plan as a page for a browser")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan made by `compile -o`")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key: schedule=naive")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Options that belong to no command."""
    if version:
        print(f"rollplex {__version__}")
        raise typer.Exit


@app.command("compile")
def compile_(
    algorithm: AlgorithmFile,
    job: JobFile,
    overrides: Overrides = None,
    set_: Set = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="print the plan page")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON and nothing else")] = False,
    print_after: Annotated[
        list[str] | None, typer.Option(metavar="PASS", help="print the module after this pass, or after `all`")
    ] = None,
    passes: Annotated[
        str, typer.Option(metavar="LIST", help="a,b: run these; ..a: up to a; -a: all but a (see `rollplex passes`)")
    ] = "",
    time: Annotated[bool, typer.Option("--time", help="print the seconds of each pass, and the solver's part")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the plan to a file")] = None,
    html: Html = None,
) -> None:
    """Compile an algorithm under a job to a plan; needs no GPU and no engine."""
    look = _Look(print_after or [], passes, sys.stderr if as_json else sys.stdout)
    with Stopwatch() as watch:
        if api.ends_early(passes):
            _refuse_plan_options(
                passes, {"--plan-only": plan_only, "--json": as_json, "--output": output, "--html": html}
            )
            _run_passes(algorithm, job, _overrides(overrides, set_), look)
            plan = None
        else:
            plan = _compile(algorithm, job, _overrides(overrides, set_), look).plan
    if time:
        from rollplex.show.tables import stages_table

        terminal.show(stages_table(watch.stages), terminal.err() if as_json else None)
    if plan is None:
        raise typer.Exit
    if output:
        terminal.write(output, plan.to_json())
    if html:
        terminal.write_html(html, plan, job.name)
    if as_json:
        sys.stdout.write(plan.to_json())
    else:
        terminal.page(plan, job.name, whole=plan_only or not (output or html))
    raise typer.Exit(0 if plan.feasible else 1)


@app.command()
def show(plan: PlanFile, html: Html = None) -> None:
    """Print the page of a plan file, or write it for a browser; the figures are the file's, nothing is compiled."""
    loaded = api.load_plan(plan)
    if html:
        terminal.write_html(html, loaded, "")
    terminal.page(loaded, "", whole=not html)
    raise typer.Exit(0 if loaded.feasible else 1)


@app.command()
def explain(
    plan: PlanFile,
    object_: Annotated[str | None, typer.Argument(metavar="[OBJECT]", help="its name or title")] = None,
    peak: Annotated[bool, typer.Option("--peak", help="what makes the peak")] = False,
) -> None:
    """Tell why an object is where it is and what another place would cost; or, with --peak, what makes the peak."""
    from rollplex.show.explained import explained_lines, peak_lines

    loaded = api.load_plan(plan)
    if object_ is None or peak:
        terminal.show(peak_lines(loaded))
    if object_ is not None:
        terminal.show(explained_lines(api.explain(loaded, object_), loaded))


@app.command()
def diff(old: PlanFile, new: PlanFile) -> None:
    """Tell what differs between two plans, nothing of what is equal; exit status 0 when nothing does, 1 otherwise."""
    from rollplex.show.difference import difference_lines

    lines = difference_lines(api.load_plan(old), api.load_plan(new))
    terminal.show(lines)
    raise typer.Exit(1 if lines else 0)


@app.command()
def verify(plan: PlanFile) -> None:
    """Replay a plan and refuse it, with every reason, if any process could misuse memory or read a wrong state."""
    from rollplex.show.checked import checked_lines

    loaded = api.load_plan(plan)
    found = api.violations(loaded)
    if found:
        terminal.complain(RollplexError(*found))
        terminal.err().print(f"{len(found)} violation{'s' if len(found) > 1 else ''} in {plan}")
        raise typer.Exit(1)
    terminal.show(checked_lines(loaded, str(plan), api.rule_count()))
    raise typer.Exit(0 if loaded.feasible else 1)


@app.command()
def run(
    program: Annotated[str, typer.Argument(metavar="ALGORITHM|PLAN", help="FILE.py, FILE.py:NAME, or a plan.json")],
    overrides: Overrides = None,
    job: Annotated[Path | None, typer.Option("--job", "-j", help="the job; not with a plan")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="a directory for the results, new or empty")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out, if one began there")] = False,
    steps: Annotated[int | None, typer.Option(help="iterations, instead of the job's")] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE.py:FUNCTION", help="bind a host function")
    ] = None,
) -> None:
    """Run an algorithm, or a compiled plan, in engine processes on this machine, and print a report."""
    from rollplex import hosts

    if resume and out is None:
        raise RunError("which run?", where="--resume", hint="--out names the directory of the run to go on with")
    compiled = _program(program, job, _overrides(overrides, set_))
    plan = compiled.plan if steps is None else api.with_steps(compiled.plan, steps)
    if not plan.feasible:
        terminal.page(plan, job.name if job else "", whole=False)
        raise typer.Exit(1)
    bound = compiled.algorithm.fn.__globals__ if compiled.algorithm else {}
    functions = hosts.find(plan, bound, host or ())
    _run(plan, functions, out or _free_directory(program), resume)


@app.command()
def calibrate(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="the job, a YAML file")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="the file that cluster.calibration names")],
    overrides: Overrides = None,
    set_: Set = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="about how long it may take (default: 240)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="few points, a minute in all")] = False,
) -> None:
    """Measure this machine's GPU at a job's shapes: rates, and decode and prefixes beside each other.

    Ranks that cut a model are measured together, each on a GPU of its own.
    """
    from rollplex.watch import CalibrationWatch

    with CalibrationWatch(terminal.out()) as watch:
        found = api.calibrate(
            job, _overrides(overrides, set_), out, seconds=seconds, quick=quick, tell=watch.tell, begin=watch.begin
        )
    rows = len(found.surface.rows) if found.surface else 0
    terminal.out().print(f"\nwritten    {out}  {rows} points beside each other, digest {found.digest}")
    terminal.out().print(f"use it     cluster: {{calibration: {out.name}}}  sharing: {{kind: solved}}")


app.add_typer(lists)


@app.command()
def doctor() -> None:
    """Look at this machine: what is installed, what is missing, what to do about it."""
    from rollplex.doctor import healthy, look
    from rollplex.show.health import health_lines

    found = look()
    terminal.show(health_lines(found))
    raise typer.Exit(0 if healthy(found) else 1)


# ---- helpers


def _overrides(bare: list[str] | None, options: list[str] | None) -> list[str]:
    return [*(options or ()), *(bare or ())]


@dataclass(frozen=True)
class _Look:
    """What to print of the passes as they run: after which, of which, and where."""

    after: list[str] = field(default_factory=list)
    passes: str = ""
    file: TextIO = sys.stdout

    def check(self) -> None:
        """PassError for a name that is no pass."""
        if wanted := [name for name in self.after if name != "all"]:
            api.check_pass_names(wanted, self.passes)

    @contextmanager
    def progress(self) -> Iterator[OnPass]:
        """Passes are named on stderr as they run; modules that were asked for are printed."""
        with terminal.err().status("compiling") as status:

            def on_pass(report: PassReport) -> None:
                status.update(f"compiling: {report.name} took {report.seconds:.2f} s")
                if report.name in self.after or "all" in self.after:
                    print(f"after {report.name}\n{api.describe_pass(report)}", file=self.file)

            yield on_pass


def _compile(algorithm: str, job: Path, overrides: list[str], look: _Look) -> api.Compiled:
    look.check()
    with look.progress() as on_pass:
        return api.compile_files(algorithm, job, overrides, on_pass, look.passes)


def _run_passes(algorithm: str, job: Path, overrides: list[str], look: _Look) -> None:
    """Run some of the passes; without `--print-after`, what the last of them left is printed."""
    look.check()
    last: list[PassReport] = []
    with look.progress() as on_pass:

        def keep(report: PassReport) -> None:
            on_pass(report)
            last[:] = [report]

        api.run_passes(algorithm, job, overrides, keep, look.passes)
    if not look.after:
        print(f"after {last[0].name}\n{api.describe_pass(last[0])}")


def _refuse_plan_options(passes: str, given: dict[str, object]) -> None:
    options = [name for name, value in given.items() if value]
    if options:
        what = f"runs some passes only: no plan comes of it for {', '.join(options)}"
        raise PassError(what, where=f"--passes {passes}", hint="-NAME leaves a pass out and still makes a plan")


def _program(program: str, job: Path | None, overrides: list[str]) -> api.Compiled:
    """Compile an algorithm, or read a plan, which has its job inside."""
    if not program.endswith(".json"):
        if job is None:
            raise RunError("an algorithm needs a job", where=program, hint="--job examples/jobs/shapes_host.yaml")
        return _compile(program, job, overrides, _Look())
    if job is not None or overrides:
        what = "a plan is compiled already: --job and overrides do not apply"
        raise RunError(what, where=program, hint="pass the algorithm instead of the plan, or leave them out")
    return api.Compiled(api.load_plan(program), None)


def _run(plan: Plan, functions: dict, out_dir: Path, resume: bool) -> None:
    from rollplex.runtime.printing import print_report
    from rollplex.watch import RunWatch

    if resume and not out_dir.exists():
        terminal.err().print(f"no run began in {out_dir}: this one begins with step 1")
    watch = RunWatch(plan, terminal.err())
    try:
        with watch:
            result = api.run(plan, hosts=functions, out_dir=out_dir, progress=watch, resume=resume)
        print_report(result.report, terminal.out())
        terminal.out().print(f"\nresults    {out_dir}/  reward.png  report.json  trace.json  metrics.jsonl  final/")
        if result.report.ended != "complete":
            raise KeyboardInterrupt
    except (RollplexError, KeyboardInterrupt):
        if watch.saved:
            terminal.err().print(f"saved      after step {watch.saved}; the same with --out {out_dir} --resume goes on")
        raise


def _free_directory(program: str) -> Path:
    """runs/grpo_video-1, or the next number that is free."""
    stem = Path(program.partition(".py:")[0]).stem
    return next(path for n in range(1, 10**6) if not (path := Path("runs") / f"{stem}-{n}").exists())


def _status(error: RollplexError) -> int:
    """A run that failed is 1, wrong input is 2."""
    return 1 if isinstance(error, EngineError | OutOfMemory) else 2


def main() -> NoReturn:
    """The entry point: no user ever sees a traceback."""
    try:
        app(prog_name="rollplex")
    except RollplexError as error:
        terminal.complain(error)
        sys.exit(_status(error))
    except BrokenPipeError:
        terminal.leave_pipe()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sys.exit(terminal.confess(error))
    sys.exit(0)


if __name__ == "__main__":
    main()
