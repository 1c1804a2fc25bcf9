"""The report on a terminal: what a person looks at after a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rollplex.ir.sizes import pretty
from rollplex.runtime.memorylog import Place
from rollplex.runtime.report import Report, WindowTime


def print_report(report: Report, console: Console) -> None:
    """Reward, times, overlap, memory; aligned, with colour only where the console has it."""
    console.print(f"\n[bold]{report.algorithm}[/]  {report.schedule}  {_progress(report)}")
    _print_reward(report, console)
    _print_failures(report, console)
    _print_sampling(report, console)
    console.print(_windows(report))
    o = report.overlap
    console.print(
        f"overlap    decode {o.decode_s:.2f} s, prefix {o.prefix_s:.2f} s a step; "
        f"{o.hidden_s:.2f} s of it ({o.hidden_share:.0%}) ran while rollout was decoding"
    )
    if o.held_s:
        console.print(
            f"           prefix work waited {o.held_s:.2f} s a step for its turn, as the plan's sharing has it"
        )
    if o.post_hidden_s:
        console.print(
            f"           scoring and training {o.post_s:.2f} s a step; "
            f"{o.post_hidden_s:.2f} s of it ({o.post_hidden_share:.0%}) ran while rollout was decoding"
        )
    _print_objects(report, console)
    _print_stages(report, console)


def _progress(report: Report) -> str:
    done = f"{report.steps_done} of {report.steps_planned} steps, {report.step_s:.2f} s a step"
    return done if report.ended == "complete" else f"{done} ({report.ended})"


def _print_reward(report: Report, console: Console) -> None:
    rewards = report.rewards
    if not rewards:
        return
    part = max(1, len(rewards) // 10)
    first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
    console.print(f"reward     {first:.3f} -> {last:.3f}   {sparkline(rewards)}")


def sparkline(values: list[float], width: int = 60) -> str:
    """Values as one line of bars, means of neighbours where there are more than `width`."""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[int((v - low) / (high - low) * 7.999) if high > low else 0] for v in means)


def _windows(report: Report) -> Table:
    """A line a window, a total a phase and a step: seconds and bytes, predicted beside measured."""
    table = Table(box=None, pad_edge=False)
    for column in ("window", "predicted s", "measured s", "of it waiting", "planned", "measured"):
        table.add_column(column, justify="left" if column == "window" else "right")
    nbytes = {row.window: (pretty(row.planned), pretty(row.measured)) for row in report.memory}
    for phase in dict.fromkeys(row.phase for row in report.times):
        rows = [row for row in report.times if row.phase == phase]
        for row in rows:
            table.add_row(row.window, *_seconds([row]), *nbytes.get(row.window, ("", "")))
        table.add_row(f"[bold]{phase}[/]", *_seconds(rows))
    table.add_row("[bold]step[/]", *_seconds(report.times))
    return table


def _seconds(rows: Sequence[WindowTime]) -> tuple[str, str, str]:
    sums = (sum(row.predicted_s for row in rows), sum(row.measured_s for row in rows), sum(r.waiting_s for r in rows))
    return f"{sums[0]:.3f}", f"{sums[1]:.3f}", f"{sums[2]:.3f}"


def _print_failures(report: Report, console: Console) -> None:
    """Calls of the user's functions that failed and counted as a score."""
    failed = sum(int(n) for row in report.metrics for name, n in row.items() if name.endswith("_failures"))
    if failed:
        console.print(f"[red]failures   {failed} calls of host functions failed and count as a score: logs/host.log[/]")


def _print_sampling(report: Report, console: Console) -> None:
    """Rounds of dynamic sampling, and steps that came short of groups."""
    if (s := report.sampling) is None:
        return
    console.print(
        f"rounds     {s.rounds:.1f} a step for {s.wanted} groups, {s.groups:.1f} sampled; "
        f"{s.kept_share:.0%} kept (the job guesses {s.guessed_share:.0%})"
    )
    if s.short_steps:
        left = f"{s.short_groups} groups that teach nothing after the last round are left out of their losses"
        console.print(f"[red]           {s.short_steps} of {report.steps_done} steps are short: {left}[/]")


def _print_objects(report: Report, console: Console) -> None:
    for row in report.pieces:
        told = "let go piece by piece, as planned" if row.planned == row.measured else "NOT let go as planned"
        console.print(f"pieces     {row.object}: {len(row.planned)} {told}")
    _print_places(report, console)
    wrong = [row for row in report.objects if not row.as_planned]
    if not wrong:
        held = sum(not row.temporary for row in report.objects)
        console.print(
            f"memory     as planned: {held} objects equal, {len(report.objects) - held} workspaces within plan"
        )
        return
    for row in wrong:
        console.print(
            f"[red]memory     {row.window}: {row.object} measured {row.measured}, planned {row.planned} bytes[/]"
        )


def _print_places(report: Report, console: Console) -> None:
    """The pinned pool: where objects lay in it."""
    wrong = [row for row in report.places if row.planned != row.measured]
    if report.places and not wrong:
        console.print(f"pool       as planned: {len({row.object for row in report.places})} objects at their places")
    for row in wrong:
        console.print(
            f"[red]pool       {row.window}: {row.object} at bytes {_bytes(row.measured)}, "
            f"planned {_bytes(row.planned)}[/]"
        )


def _print_stages(report: Report, console: Console) -> None:
    """Seconds before the first step and behind the last, of the first process of a kind: the others do the same."""
    for phase in ("start", "end"):
        rows = [row for row in report.stages if row.phase == phase]
        for place, process in enumerate(p for p in dict.fromkeys(row.process for row in rows) if p.endswith(" 0")):
            told = ", ".join(f"{row.stage} {row.seconds:.1f}" for row in rows if row.process == process)
            console.print(f"{phase if place == 0 else '':<11}{process.removesuffix(' 0')}: {told} s")


def _bytes(place: Place | None) -> str:
    return "{} to {}".format(*place) if place else "none"
