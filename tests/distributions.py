"""Make-believe installed packages: a folder with modules and the metadata that pip would have written beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollplex.ir import plugins


def distribution(folder: Path, name: str, points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]) -> None:
    """Write `name` 1.2: `points` are {group: {name: module:object}}, `modules` the text of each module."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in points.items())
    (info / "entry_points.txt").write_text("\n".join(groups))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


def visible(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the folder were site-packages, until the test is over."""
    monkeypatch.syspath_prepend(str(folder))
    plugins.declared.cache_clear()
    monkeypatch.setattr(plugins, "declared", plugins.declared.__wrapped__)
