"""The report on a terminal: what a person looks at after a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rollplex.ir.sizes import pretty
from rollplex.runtime.report import Report


def print_report(report: Report, console: Console) -> None:
    """Reward, times, overlap, memory; aligned, with colour only where the console has it."""
    console.print(f"\n[bold]{report.algorithm}[/]  {report.schedule}  {_progress(report)}")
    _print_reward(report, console)
    console.print(_times(report))
    o = report.overlap
    console.print(
        f"overlap    decode {o.decode_s:.2f} s, prefix {o.prefix_s:.2f} s a step; "
        f"{o.hidden_s:.2f} s of it ({o.hidden_share:.0%}) ran while rollout was decoding"
    )
    if o.post_hidden_s:
        console.print(
            f"           scoring and training {o.post_s:.2f} s a step; "
            f"{o.post_hidden_s:.2f} s of it ({o.post_hidden_share:.0%}) ran while rollout was decoding"
        )
    console.print(_memory(report))
    _print_objects(report, console)


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


def _times(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("window", "predicted s", "measured s", "of it waiting"):
        table.add_column(column, justify="left" if column == "window" else "right")
    for row in report.times:
        table.add_row(row.window, f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", f"{row.waiting_s:.3f}")
    return table


def _memory(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("window", "planned", "measured"):
        table.add_column(column, justify="left" if column == "window" else "right")
    for row in report.memory:
        table.add_row(row.window, pretty(row.planned), pretty(row.measured))
    return table


def _print_objects(report: Report, console: Console) -> None:
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
