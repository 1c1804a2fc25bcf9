"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rollplex import api, cli, doctor
from rollplex.doctor import Finding
from rollplex.ir.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
GRPO, VIDEO = str(ROOT / "examples/grpo.py"), str(ROOT / "examples/grpo_video.py")
JOB = str(ROOT / "examples/jobs/qwen2_5_vl_32b_h800x8.yaml")


class Result(NamedTuple):
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


Rollplex = Callable[..., Result]


@pytest.fixture
def rollplex(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rollplex:
    """Run a command line in this process; no command may ever show a traceback."""

    def run(*argv: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["rollplex", *argv])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        code = stopped.value.code
        return Result(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 32B plan on disk."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(api.compile_files(GRPO, JOB).plan.to_json())
    return path


# ---- tables


@pytest.mark.parametrize("command", ["models", "gpus", "--help", "--version"])
def test_what_needs_no_torch_imports_none(command: str) -> None:
    """The tables answer at once: neither torch nor OR-Tools is loaded for them."""
    script = (
        "import sys; from rollplex.cli import main; sys.argv = ['rollplex', sys.argv[1]]\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print([m for m in ('torch', 'ortools', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_models_lists_the_registry_exactly(rollplex: Rollplex) -> None:
    """The row of numbers.md for the 32B model: shape, vision tower, parameters, GiB, KV bytes."""
    result = rollplex("models")
    row = next(t for t in result.out.splitlines() if t.startswith("Qwen2.5-VL-32B"))
    assert row.split()[1:] == [
        "5120/64/40/8/27648/152064", "1280/32/16/3456", "33,452,718,336", "62.31", "262,144"
    ]  # fmt: skip
    assert result.status == 0


def test_gpus_say_where_their_memory_figure_comes_from(rollplex: Rollplex) -> None:
    """A figure from a log and an estimate are told apart."""
    rows = {t.split()[0]: t for t in rollplex("gpus").out.splitlines()}
    assert rows["H100"].split()[1] == "79.1"
    assert rows["H100"].endswith("read in a log")
    assert "estimated" in rows["B200"]


def test_passes_are_listed_with_their_facts(rollplex: Rollplex) -> None:
    """Every pass of the pipeline, numbered, with what it makes."""
    out = rollplex("passes").out
    assert " 1  infer-types   Types" in out
    assert "residency     Residency" in out


@pytest.mark.parametrize("command", ["models", "gpus", "passes", "doctor"])
def test_tables_fit_the_page(command: str, rollplex: Rollplex) -> None:
    """No table is wider than 100 columns, and none has colours in a pipe."""
    out = rollplex(command).out
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out


# ---- compile


def test_a_feasible_plan_exits_0_with_its_page(rollplex: Rollplex) -> None:
    """The 32B job on one node fits; stdout is the page and nothing else."""
    result = rollplex("compile", GRPO, "--job", JOB, "--plan-only")
    assert result.status == 0
    assert "rollplex   grpo.py x qwen2_5_vl_32b_h800x8.yaml" in result.out
    assert "case 1 60.06 %   case 2 32.77 %   case 3 7.17 %" in result.out
    assert "case-3 buffer 1.09 GiB" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    assert result.err == ""


@pytest.mark.parametrize("override", [["schedule=naive"], ["--set", "schedule=naive"]])
def test_an_infeasible_plan_exits_1_with_the_reason(override: list[str], rollplex: Rollplex) -> None:
    """Overrides work bare and with --set; the naive overlap needs more than a GPU has."""
    result = rollplex("compile", GRPO, "--job", JOB, *override)
    assert result.status == 1
    assert "DOES NOT FIT" in result.out
    assert "naive overlap" in result.out
    assert "would fit  1  schedule=rollplex" in result.out


def test_json_is_the_plan_and_nothing_else(rollplex: Rollplex) -> None:
    """--json has the stable keys of design.md section 9, and a second run gives the same bytes."""
    first, second = (rollplex("compile", GRPO, "--job", JOB, "--json") for _ in range(2))
    assert first.out == second.out
    plan = json.loads(first.out)
    assert plan["feasible"] is True
    assert plan["job"]["cluster"]["gpu"] == "H800"
    keys = "capacity_bytes peak_hbm_bytes peak_window peak_host_bytes objects windows layout chunks times policy"
    assert set(keys.split()) <= set(plan["summary"])
    assert set(plan["summary"]["layout"]) >= {"q", "cases", "case3_buffer_bytes", "exchange_bytes_per_gpu", "tensors"}
    assert set(plan["programs"]) == {"controller", "train", "rollout"}


def test_output_writes_the_plan_and_prints_the_verdict(rollplex: Rollplex, tmp_path: Path) -> None:
    """-o gives a file that verify accepts; the page is printed only when asked for."""
    path = tmp_path / "plan.json"
    result = rollplex("compile", GRPO, "--job", JOB, "-o", str(path))
    assert "FITS" in result.out
    assert "state contract" not in result.out
    assert rollplex("verify", str(path)).status == 0


def test_output_to_nowhere_is_told(rollplex: Rollplex, tmp_path: Path) -> None:
    """A file that cannot be written is the user's to fix."""
    result = rollplex("compile", GRPO, "--job", JOB, "-o", str(tmp_path / "no/plan.json"))
    assert result.status == 2
    assert "cannot write the plan: No such file or directory" in result.err


def test_print_after_shows_the_module(rollplex: Rollplex) -> None:
    """After prefix-split the graph has prefixes and suffixes; beside JSON it goes to stderr."""
    result = rollplex("compile", GRPO, "--job", JOB, "--print-after", "prefix-split", "-o", "/dev/null")
    assert "actor.suffix(" in result.out
    beside = rollplex("compile", GRPO, "--job", JOB, "--print-after", "layout", "--json")
    assert json.loads(beside.out)
    assert "stock order, q = 2" in beside.err


def test_print_after_all_is_after_each(rollplex: Rollplex) -> None:
    """Every pass under its name, in order."""
    out = rollplex("compile", GRPO, "--job", JOB, "--print-after", "all", "-o", "/dev/null").out
    printed = [line.removeprefix("after ") for line in out.splitlines() if line.startswith("after ")]
    assert printed == [row.name for row in api.pass_rows()]


def test_some_passes_print_what_the_last_one_left(rollplex: Rollplex) -> None:
    """`..PASS` ends there: its fact, no plan, exit 0."""
    result = rollplex("compile", GRPO, "--job", JOB, "--passes", "..share-prefix")
    assert result.status == 0
    assert result.out.startswith("after share-prefix\n@rx.algorithm")
    assert "kv_act    actor            32              8  one for each prompt" in result.out
    assert "FITS" not in result.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--passes", "-residency"],
            "--passes: `lower` needs Residency, which `residency` makes\n  try: run `residency`",
        ),
        (
            ["--passes", "..layout", "--json"],
            "--passes ..layout: runs some passes only: no plan comes of it for --json",
        ),
        (["--passes", "..layout", "--print-after", "lower"], "--print-after: no pass `lower`\n  try: infer-types, "),
    ],
)
def test_passes_that_make_no_sense(argv: list[str], message: str, rollplex: Rollplex) -> None:
    """Wrong input, with who needs what, and nothing on stdout."""
    result = rollplex("compile", GRPO, "--job", JOB, *argv)
    assert result.status == 2
    assert message in result.err
    assert result.out == ""


def test_time_is_told_by_pass(rollplex: Rollplex) -> None:
    """From the job to the check, the parts add up to the total; a solver pass has a solver's share."""
    out = rollplex("compile", GRPO, "--job", JOB, "-o", "/dev/null", "--time").out
    rows = re.findall(r"^(\S.*?) {2,}([\d.]+)(?: +([\d.]+))?$", out, re.MULTILINE)
    table = {name: (float(seconds), float(solver or 0)) for name, seconds, solver in rows}
    assert list(table)[:3] == ["read the job", "import torch and OR-Tools", "load the algorithm"]
    assert [name for name in table if name in {r.name for r in api.pass_rows()}] == [r.name for r in api.pass_rows()]
    seconds, solver = table.pop("total")
    assert seconds == pytest.approx(sum(row[0] for row in table.values()), abs=0.02)
    assert 0 < solver < seconds
    assert 0 < table["residency"][1] <= table["residency"][0]


def test_no_package_adds_anything(rollplex: Rollplex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in words, not as an empty table."""
    monkeypatch.setattr(api, "declared", lambda group: ())
    assert rollplex("plugins").out == "no installed package adds a pass, an algorithm or an engine\n"


def test_an_unknown_pass_is_corrected(rollplex: Rollplex) -> None:
    """A typing mistake gets the nearest name."""
    result = rollplex("compile", GRPO, "--job", JOB, "--print-after", "prefix-spilt")
    assert result.status == 2
    assert result.err == "error: --print-after: no pass `prefix-spilt`\n  try: prefix-split\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compile", "none.py", "--job", JOB], "there is no file none.py"),
        (["compile", f"{GRPO}:gpro", "--job", JOB], "no algorithm `gpro`"),
        (["compile", GRPO, "--job", "none.yaml"], "none.yaml"),
        (["compile", GRPO, "--job", JOB, "shedule=naive"], "unknown key `shedule`"),
        (["compile", GRPO, "--job", JOB, "naive"], "write section.key=value"),
        (["verify", "none.json"], "cannot read the plan"),
        (["run", GRPO], "an algorithm needs a job"),
        (["run", GRPO, "--job", JOB, "roles.actor.lora={rank: 64}"], "no backend executes this plan: actor lora"),
        (["run", VIDEO, "--job", JOB, "--host", "reward"], "`reward` binds no function"),
        (["run", VIDEO, "--job", JOB, "--host", "score=os.path:join"], "calls no host function `score`"),
        (["run", VIDEO, "--job", JOB, "--host", "reward=none.py:f"], "there is no file none.py"),
        (["run", VIDEO, "--job", JOB, "--host", "reward=os.path:jion"], "os.path has no function `jion`"),
        (["run", VIDEO, "--job", JOB, "--host", "reward=no_such:f"], "cannot import no_such"),
        (["run", VIDEO, "--job", JOB, "--steps", "0"], "0 steps"),
    ],
)
def test_wrong_input_exits_2_and_says_what(argv: list[str], message: str, rollplex: Rollplex) -> None:
    """A user's mistake is told on stderr, with nothing on stdout."""
    result = rollplex(*argv)
    assert result.status == 2
    assert message in result.err
    assert result.out == ""


def test_every_problem_has_its_own_line(rollplex: Rollplex) -> None:
    """All mistakes of a job come at once, each with its place and what to try."""
    result = rollplex("compile", GRPO, "--job", JOB, "schedule=fast", "workload.groop=4")
    assert result.err.count("error: ") == 2
    assert "  try: group" in result.err


def test_usage_errors_exit_2(rollplex: Rollplex) -> None:
    """A missing option is an input error too."""
    assert rollplex("compile", GRPO).status == 2


# ---- verify


def edited(plan_file: Path, tmp_path: Path, edit: Callable[[dict], object]) -> str:
    """A copy of the plan, changed."""
    plan = json.loads(plan_file.read_text())
    edit(plan)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(plan))
    return str(path)


def drop_first_fetch(plan: dict) -> None:
    steps = plan["programs"]["train"]
    steps.remove(next(s for s in steps if s["kind"] == "fetch"))


def test_a_sound_plan_is_ok(plan_file: Path, rollplex: Rollplex) -> None:
    """The facts that were checked, one a line."""
    result = rollplex("verify", str(plan_file))
    assert result.status == 0
    assert all(t.startswith("ok: ") for t in result.out.splitlines())
    assert "3 programs replayed" in result.out


def test_a_broken_plan_exits_1_with_every_violation(plan_file: Path, tmp_path: Path, rollplex: Rollplex) -> None:
    """A dropped fetch is refused by the rule it breaks, at the step that reads the object."""
    result = rollplex("verify", edited(plan_file, tmp_path, drop_first_fetch))
    assert result.status == 1
    assert "reference.weights" in result.err
    assert "violation" in result.err.splitlines()[-1]
    assert result.out == ""


def test_a_sound_plan_that_does_not_fit_exits_1(tmp_path: Path, rollplex: Rollplex) -> None:
    """Verified, and said to be over capacity."""
    path = tmp_path / "naive.json"
    assert rollplex("compile", GRPO, "--job", JOB, "schedule=naive", "-o", str(path)).status == 1
    result = rollplex("verify", str(path))
    assert result.status == 1
    assert "DOES NOT FIT: P1 prefix-reference is 93.7 GiB over capacity" in result.out


def test_a_plan_with_a_wrong_job_exits_2(plan_file: Path, tmp_path: Path, rollplex: Rollplex) -> None:
    """The job inside a plan is checked too."""
    result = rollplex("verify", edited(plan_file, tmp_path, lambda plan: plan["job"].pop("workload")))
    assert result.status == 2
    assert "job.workload: Field required" in result.err


# ---- run


def test_a_plan_takes_no_job(plan_file: Path, rollplex: Rollplex) -> None:
    """A plan has its job inside."""
    result = rollplex("run", str(plan_file), "--job", JOB)
    assert result.status == 2
    assert "a plan is compiled already" in result.err


def test_an_infeasible_job_is_not_run(rollplex: Rollplex) -> None:
    """It exits as compile does, with the reason."""
    result = rollplex("run", VIDEO, "--job", JOB, "schedule=naive")
    assert result.status == 1
    assert "DOES NOT FIT" in result.out


# ---- doctor


def test_doctor_looks_at_core_machine_and_gpus(rollplex: Rollplex) -> None:
    """One line a finding; a machine without a GPU is no failure."""
    result = rollplex("doctor")
    assert result.status == 0
    for name in ("python", "torch", "ortools", "transformers", "cores", "memory", "memfd", "memlock", "vllm"):
        assert f" {name} " in result.out


def test_doctor_fails_on_a_broken_core(rollplex: Rollplex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is there but does not load is broken, and the exit status says so."""
    real = doctor.importlib.import_module

    def load(name: str) -> object:
        if name == "ortools":
            raise ImportError("libortools.so: not found")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", load)
    result = rollplex("doctor")
    assert result.status == 1
    assert "does not load: libortools.so: not found" in result.out
    assert "pip install --force-reinstall ortools" in " ".join(result.out.split())


def test_only_the_core_decides() -> None:
    """Missing engines leave a machine healthy, a missing core package does not."""
    assert doctor.healthy((Finding("GPU", "vllm", "missing", ""), Finding("core", "torch", "ok", "")))
    assert not doctor.healthy((Finding("core", "torch", "missing", ""),))


# ---- the last resort


def test_our_own_bug_leaves_a_log(rollplex: Rollplex, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody foresaw: one line, a file with the traceback, exit 70."""

    def explode(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(api, "compile_files", explode)
    result = rollplex("compile", GRPO, "--job", JOB)
    assert result.status == 70
    assert result.err.startswith("internal error: KeyError: 'lost'")
    log = Path(result.err.split()[-1])
    assert "Traceback" in log.read_text()
    log.unlink()


def test_interruption_exits_130(rollplex: Rollplex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no error of anybody."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "compile_files", interrupt)
    assert rollplex("compile", GRPO, "--job", JOB).status == 130


def test_a_reader_that_goes_away_is_no_bug() -> None:
    """`rollplex models | head -1` ends without a word."""
    command = f"{sys.executable} -m rollplex models | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("model")
    assert done.stderr == ""


# ---- a whole run

SHAPES = str(ROOT / "examples/jobs/shapes_host.yaml")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that make the shapes job small: eight new videos, random weights, two prompts of two responses."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from shapes.make import make

    folder = tmp_path_factory.mktemp("shapes")
    train, _ = make(folder, videos=8, heldout=1, seed=0)
    monkeypatch.undo()
    return [f"run.data={train}", "run.weights=null", "workload.prompts=2", "workload.group=2", "run.steps=2"]


def test_an_algorithm_runs_and_reports(small: list[str], rollplex: Rollplex, tmp_path: Path) -> None:
    """Progress on stderr, the report on stdout, results in the directory; a second run there is refused."""
    command = ["run", VIDEO, "--job", SHAPES, "--out", str(tmp_path / "run"), *small]
    result = rollplex(*command)
    assert result.status == 0, result.err
    assert "step    2 of 2  reward" in result.err
    assert "2 of 2 steps" in result.out
    assert "as planned" in result.out
    for name in ("reward.png", "report.json", "trace.json", "metrics.jsonl", "final/config.json"):
        assert (tmp_path / "run" / name).exists()
    again = rollplex(*command)
    assert again.status == 2
    assert "the run directory is not empty" in again.err


def test_a_plan_runs_with_a_bound_host_function(small: list[str], rollplex: Rollplex, tmp_path: Path) -> None:
    """A compiled plan needs no algorithm file: the reward is bound on the command line."""
    plan = str(tmp_path / "plan.json")
    assert rollplex("compile", VIDEO, "--job", SHAPES, "-o", plan, *small).status == 0
    missing = rollplex("run", plan, "--out", str(tmp_path / "run"))
    assert missing.status == 2
    assert "no function for `reward`" in missing.err
    reward = f"reward={ROOT / 'examples/shapes/reward.py'}:exact_answer"
    result = rollplex("run", plan, "--out", str(tmp_path / "run"), "--host", reward, "--steps", "1")
    assert result.status == 0, result.err
    assert "1 of 1 steps" in result.out


def test_a_run_that_ends_early_says_how_it_goes_on(
    small: list[str], rollplex: Rollplex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where there is a checkpoint; where nothing began, --resume says that it begins."""
    from rollplex.ir.errors import EngineError
    from rollplex.runtime.events import CheckpointWritten, Progress

    saved: list[int] = []

    def dies(plan: Plan, progress: Progress, **_: object) -> None:
        for step in saved:
            progress(CheckpointWritten(step, 0.1))
        raise EngineError("it died")

    monkeypatch.setattr(api, "run", dies)
    out = tmp_path / "none"
    command = ("run", VIDEO, "--job", SHAPES, "--out", str(out), "--resume", *small)
    assert rollplex(*command).err.splitlines()[-2:] == [
        f"no run began in {out}: this one begins with step 1",
        "error: it died",
    ]
    saved += [5, 10]
    found = rollplex(*command)
    assert found.status == 1
    assert f"saved      after step 10; the same with --out {out} --resume goes on" in found.err


def test_a_log_gets_a_line_now_and_then() -> None:
    """Without a terminal a run of 40 steps says the first and every tenth part of the way."""
    import pageplan
    from rich.console import Console

    from rollplex.ir.plan import NodeRecord
    from rollplex.runtime.events import IterationDone
    from rollplex.watch import RunWatch

    made = pageplan.plan(hosts={"score": "reward"})
    score = NodeRecord(name="score", op="rx.host", args=({"ref": "rollout"},), loc="tiny.py:5", phase="P2")
    plan = api.with_steps(made.model_copy(update={"graph": (*made.graph, score)}), 40)
    console = Console(file=io.StringIO(), width=100)
    with RunWatch(plan, console) as watch:
        for i in range(40):
            watch(IterationDone(i, 40, {"reward": i / 40, "step_s": 0.5}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [int(text.split()[1]) for text in lines] == [1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert lines[-1] == "step   40 of 40  reward 0.975  0.50 s"


def test_the_shapes_job_needs_its_offloading() -> None:
    """It fits because states leave the device; with the saved prefix state kept there it does not fit."""
    plan = api.compile_files(VIDEO, SHAPES).plan
    assert plan.feasible
    for name in ("actor.prefix_saved", "actor.master", "actor.moments"):
        assert set(plan.object(name).residency.values()) <= {"host", "dropped", "-"}
    assert not api.compile_files(VIDEO, SHAPES, ["roles.actor.prefix_saved=hbm"]).plan.feasible


# ---- plan files: show, html, diff


def test_show_prints_and_writes_a_plan_file(rollplex: Rollplex, plan_file: Path, tmp_path: Path) -> None:
    """The same page that `compile` printed, from the file alone; --html writes it for a browser."""
    assert "FITS" in (shown := rollplex("show", str(plan_file))).out
    assert shown.status == 0
    page = tmp_path / "plan.html"
    assert rollplex("show", str(plan_file), "--html", str(page)).status == 0
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_compile_writes_a_page(rollplex: Rollplex, tmp_path: Path) -> None:
    """An infeasible plan has a page too; the exit status says what it is."""
    page = tmp_path / "naive.html"
    assert rollplex("compile", GRPO, "-j", JOB, "schedule=naive", "--html", str(page)).status == 1
    assert "DOES NOT FIT" in page.read_text("utf-8")
    refused = rollplex("compile", GRPO, "-j", JOB, "--html", str(tmp_path / "none" / "x.html"))
    assert refused.status == 2
    assert "cannot write" in refused.err


def test_diff_is_like_diff(rollplex: Rollplex, plan_file: Path, tmp_path: Path) -> None:
    """0 and nothing for equal plans, 1 with what differs, 2 for what is no plan."""
    other = tmp_path / "b.json"
    rollplex("compile", GRPO, "-j", JOB, "workload.prompts=30", "-o", str(other))
    assert rollplex("diff", str(plan_file), str(plan_file)) == (0, "", "")
    found = rollplex("diff", str(plan_file), str(other))
    assert found.status == 1
    assert "workload.prompts" in found.out
    assert rollplex("diff", str(plan_file), JOB).status == 2
