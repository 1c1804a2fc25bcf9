"""Commands that list what is there: passes, what packages add, models, GPUs."""

from __future__ import annotations

import typer

from rollplex import api, terminal

lists = typer.Typer()


@lists.command()
def passes() -> None:
    """List the passes in order: what each does, the fact it makes, the package it is from."""
    from rollplex.show.tables import passes_table
    from rollplex.show.text import WIDTH

    rows = api.pass_rows()
    terminal.show(passes_table([(p.name, p.makes, f"{p.does}{_origin(p)}") for p in rows], WIDTH))


def _origin(row: api.PassRow) -> str:
    return f" (of {row.package})" if row.package else ""


@lists.command()
def plugins() -> None:
    """List what installed packages add (passes, algorithms, engines), and what is wrong with it."""
    from rollplex.show.tables import plugins_table

    rows = [(r.group, r.name, r.package, r.problem) for r in api.plugin_rows()]
    terminal.show(plugins_table(rows))
    raise typer.Exit(1 if any(problem for *_, problem in rows) else 0)


@lists.command()
def models() -> None:
    """List the built-in models: dimensions, exact parameters, GiB, KV bytes a token."""
    from rollplex.show.tables import models_table

    terminal.show(models_table(api.models()))


@lists.command()
def gpus() -> None:
    """List the built-in GPUs: memory that software can use, bandwidths, compute."""
    from rollplex.ir.hardware import GPUS
    from rollplex.show.tables import gpus_table

    terminal.show(gpus_table(GPUS))
