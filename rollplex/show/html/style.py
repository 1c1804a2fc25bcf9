"""The style sheet and the script of the page: by day and by night, on a narrow screen, on paper."""

from __future__ import annotations

from pathlib import Path

from rollplex.show.html.families import FAMILIES

_HERE = Path(__file__).parent

_LIGHT = """--page:#fff;--card:#fff;--ink:#1c2127;--faint:#5d6670;--line:#d9dde2;--grid:#e8ebee;--soft:#f4f6f8;
--good:#1a7f4b;--bad:#b3261e;--accent:#2456a6;--label:#11151a;--label-w:#fff"""
_DARK = """--page:#14171b;--card:#1a1e23;--ink:#e6e9ed;--faint:#9aa4af;--line:#343b44;--grid:#262c33;--soft:#21262c;
--good:#4cc38a;--bad:#ff8a80;--accent:#8ab4f8;--label:#0c0f12;--label-w:#fff"""


def _theme(base: str, dark: bool) -> str:
    return base + "".join(f";--{f.key}:{f.dark if dark else f.light}" for f in FAMILIES)


def style_sheet() -> str:
    """All rules; night where the reader's system, or the button, says so."""
    light, dark = _theme(_LIGHT, dark=False), _theme(_DARK, dark=True)
    themes = (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}\n"
        ":root[data-theme=light]{color-scheme:light}"
    )
    return f"{themes}\n{(_HERE / 'page.css').read_text('utf-8')}"


def script() -> str:
    """Hints under the pointer and at the focus, and the button for day and night."""
    return (_HERE / "page.js").read_text("utf-8")
