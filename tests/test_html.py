"""The page for a browser: well formed, asks no network, escapes everything, and its bars are the plan's figures."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter, defaultdict
from html.parser import HTMLParser

import pageplan
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pageplan import GIB, WINDOWS, planned
from test_planpage import OVER, any_plans

from rollplex.ir.plan import Plan
from rollplex.show.html.families import FAMILIES, shades
from rollplex.show.html.markup import el, text
from rollplex.show.html.page import html_page
from rollplex.show.html.scale import LEAST, LEFT, RIGHT, round_step, shares, time_scale

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\ud800"
VOID = {"meta", "br", "hr", "col"}


class Reader(HTMLParser):
    """Elements as they open, and whether each is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def read(plan: Plan, job_name: str = "tiny.yaml") -> Reader:
    """The page of a plan, parsed; every element is closed."""
    reader = Reader()
    page = html_page(plan, job_name)
    page.encode("utf-8")
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def over() -> Plan:
    return pageplan.plan(pageplan.summary(capacity=7 * GIB), OVER, not_executable=("engine vllm",))


@pytest.mark.parametrize("plan", [pageplan.plan(), over()], ids=["fits", "over"])
def test_nothing_is_loaded_from_anywhere(plan: Plan) -> None:
    """No address, no import, no resource; the policy of the page forbids them too, and admits our script alone."""
    page = html_page(plan)
    addresses = set(re.findall(r"[a-z]+://[^\"'\s<)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    for tag, attributes in read(plan).elements:
        assert not {"src", "href", "srcset", "action", "data", "poster"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert "@import" not in page
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src &#x27;none&#x27;; style-src &#x27;unsafe-inline&#x27;; script-src &#x27;sha256-{digest}" in page
    )


def test_hostile_names_are_text() -> None:
    """File names, objects, roles, windows, warnings, remedies: all of them appear, none of them is an element."""
    windows = [f"P1 {HOSTILE}", "P2 b"]
    one = planned("o", 1, "hhhh", title=HOSTILE, why=HOSTILE, role=HOSTILE, consumed=(windows[0],))
    objects = [one.model_copy(update={"residency": dict.fromkeys(windows, "hbm"), "name": HOSTILE})]
    summary = pageplan.summary(objects, windows).model_copy(update={"warnings": (HOSTILE,), "capacity_bytes": GIB // 2})
    remedy = OVER.remedies[0].model_copy(update={"change": f"a={HOSTILE}", "shrinks": (HOSTILE,)})
    found = OVER.model_copy(update={"window": windows[0], "remedies": (remedy,)})
    plan = pageplan.plan(summary, found, algorithm=f"{HOSTILE}:x", not_executable=(HOSTILE,), schedule=HOSTILE)
    reader = read(plan, HOSTILE)
    kinds = Counter(tag for tag, _ in reader.elements)
    assert kinds["script"] == 1
    assert not kinds["img"]
    assert sum("<script>alert(1)</script>" in words for words in reader.words) >= 6


def test_bars_add_up_to_the_plan() -> None:
    """In every window the bars of the first picture are the objects of the plan, to the byte."""
    plan = pageplan.plan()
    first = html_page(plan).split("<svg")[1].split("</svg>")[0]
    reader = Reader()
    reader.feed(first)
    found: dict[str, int] = defaultdict(int)
    heights: dict[str, float] = defaultdict(float)
    for tag, attributes in reader.elements:
        if tag == "rect" and "data-window" in attributes:
            found[str(attributes["data-window"])] += int(str(attributes["data-bytes"]))
            heights[str(attributes["data-window"])] += float(str(attributes["height"]))
    assert found == {w.name: w.hbm_bytes for w in plan.summary.windows}
    pixels = {w: h / found[w] for w, h in heights.items()}
    assert max(pixels.values()) == pytest.approx(min(pixels.values()), rel=1e-3)


def test_windows_share_the_width_by_their_seconds() -> None:
    """Short windows are widened to be seen, the others keep their proportion; none overlaps, nothing is left."""
    time = time_scale(pageplan.plan())
    assert [s.name for s in time.spans] == list(WINDOWS)
    assert time.spans[0].x == LEFT
    assert all(a.end == pytest.approx(b.x) for a, b in zip(time.spans, time.spans[1:], strict=False))
    assert time.spans[-1].end == pytest.approx(time.width - RIGHT)


@given(st.lists(st.just(0.0) | st.floats(1e-6, 1e4), min_size=1, max_size=40))
def test_shares_are_proportions_above_a_least(values: list[float]) -> None:
    """w_i = max(least, rate * v_i) with one rate for all, and they fill the room."""
    room = LEAST * len(values) * 2
    found = shares(values, room, LEAST)
    assert all(w >= LEAST * 0.999 for w in found)
    rates = [w / v for w, v in zip(found, values, strict=True) if v and w > LEAST * 1.001]
    assert not rates or max(rates) == pytest.approx(min(rates), rel=1e-6)
    assert sum(found) == pytest.approx(room) or not any(values)


@given(st.floats(1e-6, 1e12))
def test_steps_are_round(value: float) -> None:
    """1, 2 or 5 times a power of ten, not below what is asked and at most about 2.5 times it."""
    step = round_step(value)
    assert value * 0.999 <= step <= 2.6 * value
    assert f"{step:.6e}"[0] in "125"


@given(any_plans())
def test_any_plan_has_a_page(plan: Plan) -> None:
    """Whatever a plan holds, its page is well formed and names every object and window."""
    words = " ".join(read(plan).words)
    for w in plan.summary.windows:
        assert w.name in words


def test_every_family_has_a_colour_of_its_own() -> None:
    """Neighbours in a stack differ by family, or by shade within it."""
    assert len({f.light for f in FAMILIES}) == len({f.dark for f in FAMILIES}) == len(FAMILIES)
    found = shades(pageplan.OBJECTS, frozenset({"actor"}))
    assert len({(s.family, s.mix) for s in found.values()}) == len(pageplan.OBJECTS)


def test_markup_escapes_what_is_not_markup() -> None:
    """Text and attributes; what HTML cannot hold is replaced."""
    assert el("td", "<b>", class_='a"b') == '<td class="a&quot;b">&lt;b&gt;</td>'
    assert el("p", el("b", "x")) == "<p><b>x</b></p>"
    assert text("a\x00\ud800") == "a\ufffd\ufffd"
