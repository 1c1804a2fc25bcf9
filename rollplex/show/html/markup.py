"""Elements of HTML and SVG as text; whatever is not an element already is escaped, wherever it comes from.

el("td", "<b>", class_="name")     <td class="name">&lt;b&gt;</td>
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = frozenset({"meta", "br", "hr", "col"})
_UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML: made by `el` and `join` alone, so that nothing of a user gets here unescaped."""


def text(value: object) -> Markup:
    """Any value as text of a page; characters that HTML cannot hold become U+FFFD."""
    return Markup(html.escape(_UNSHOWABLE.sub("\ufffd", str(value)), quote=True))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Elements one after the other."""
    return Markup(between.join(p if isinstance(p, Markup) else text(p) for p in parts))


def el(tag: str, *children: object, **attributes: object) -> Markup:
    """An element; `class_` is class, `data_tip` is data-tip, None leaves an attribute out, numbers are rounded."""
    shown = "".join(_attribute(name, value) for name, value in attributes.items() if value is not None)
    if tag in _VOID:
        assert not children
        return Markup(f"<{tag}{shown}>")
    return Markup(f"<{tag}{shown}>{join(children)}</{tag}>")


def _attribute(name: str, value: object) -> str:
    name = name.rstrip("_").replace("_", "-")
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
    return f' {name}="{text(shown)}"'
