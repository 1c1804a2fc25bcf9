"""What the passes decided and predict, a few lines each: layout, chunks, solvers, time, warnings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.text import Text

from rollplex.ir.lora import merges
from rollplex.ir.plan import Plan, SolverResult
from rollplex.ir.planned_job import job_of
from rollplex.ir.planned_layout import LayoutAlternative, LayoutSummary
from rollplex.show.parts import told
from rollplex.show.text import LABEL, WIDTH, joined, labelled, seconds, size, under


def layout_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """Share of the language model in each layout case, what the rest costs, and where the ranks lie."""
    layout = plan.summary.layout
    total = sum(c.params for c in layout.cases.values())
    if not total:
        return _nothing_shared(plan, width)
    shares = "   ".join(f"case {k} {100 * c.params / total:.2f} %" for k, c in layout.cases.items())
    lines = labelled("layout", f"{shares}   of the language model", width)
    adds, adapters = sum(c.decode_s + c.rebuild_s for c in layout.classes), _adapters(plan)
    rest = [
        f"{layout.order} order, q = {layout.q}: case-3 buffer {size(layout.case3_buffer_bytes)} a GPU",
        f"the base is frozen, an update sends {size(adapters)} of adapters to each GPU"
        if adapters
        else f"exchange {size(layout.exchange_bytes_per_gpu)} a GPU in {seconds(layout.exchange_s)}",
        f"adds {seconds(adds)} a step",
    ]
    rows = [
        *joined(rest, width - LABEL, ", "),
        *joined([_alternative(a) for a in layout.alternatives], width - LABEL, "   "),
        *joined(_placement(layout), width - LABEL),
        *(f"needs {text}" for text in layout.needs),
    ]
    return lines + [text for row in rows for text in under(row, width)]


def _nothing_shared(plan: Plan, width: int) -> list[Text]:
    """What an update sends to engines that have weights of their own: pools apart, or adapters merged into them."""
    sent, adapters, apart = plan.summary.layout.exchange_bytes_per_gpu, _adapters(plan), len(plan.summary.pools) > 1
    merged = merges(job_of(plan))
    if apart:
        what = f"{size(sent)}{' of adapters' if adapters else ''} to each GPU of the rollout pool"
        return labelled("layout", f"two pools share no weights: every update sends {what}", width)
    what = f"adapters are merged into the rollout engine's own weights: every update sends {size(sent)} to each GPU"
    return labelled("layout", what, width) if merged else []


def _adapters(plan: Plan) -> int:
    """Bytes of the adapters that a rollout rank is served, 0 where there are none."""
    return next((o.bytes for o in plan.summary.objects if o.name == "rollout.adapters"), 0)


def _alternative(other: LayoutAlternative) -> str:
    """`(reindex: case 3 0 %, buffer 0 B, adds 0.42 s)`."""
    total = sum(c.params for c in other.cases.values())
    share = f"case 3 {100 * other.cases['3'].params / total:.3g} %"
    return f"({other.order}: {share}, buffer {size(other.case3_buffer_bytes)}, adds {seconds(other.seconds)})"


def _placement(layout: LayoutSummary) -> list[str]:
    """Engines on the same GPUs of their nodes are told once."""
    shown = [f"{name} on GPU {' '.join(map(str, gpus))}" for name, gpus in layout.placement.items()]
    shown = shown if len(shown) <= 8 else [*shown[:8], f"and {len(shown) - 8} more"]
    return shown if layout.groups == 1 else [*shown, f"alike in all {layout.groups} training groups"]


def chunk_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """Pieces of the update and units of the trainer's work."""
    optimizer, micro = plan.summary.chunks.optimizer, plan.summary.chunks.microbatch
    pieces = f"optimizer {optimizer.count} x {size(optimizer.bytes)}"
    room = f"{size(optimizer.workspace_bytes)} in flight" if optimizer.workspace_bytes else "all at once"
    prompts, responses = _count(micro.prefix_prompts, "prompt"), _count(micro.suffix_responses, "response")
    released = f", {text}" if (text := told(plan)) else ""
    return labelled("chunks", f"{pieces}, {room}{released}   microbatch {prompts}, {responses}", width)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def solver_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """One line a solver pass: status, and its objectives in their order with value and, where not proven, bound.

    Bytes over a capacity are told where there are any: the verdict says that a plan fits. Those close to it never: the
    peak says so.
    """
    lines: list[Text] = []
    names = max((len(s.name) for s in plan.summary.solvers), default=0)
    for name, results in groupby(plan.summary.solvers, key=lambda s: s.name):
        found = list(results)
        told = [s for s in found if "last tenth" not in s.objective and (s.value or "bytes over" not in s.objective)]
        status = "optimal" if all(s.status == "optimal" for s in found) else "feasible"
        head = f"{name:<{names}}  {status:<8}  "
        rows = joined([_objective(s) for s in told], width - LABEL - len(head), "   ")
        for i, text in enumerate(rows):
            lines += _raw("" if lines else "solver", (head if i == 0 else " " * len(head)) + text)
    return lines


def _raw(label: str, body: str) -> list[Text]:
    return [Text.assemble((f"{label:<{LABEL}}", "bold"), body)]


def _objective(result: SolverResult) -> str:
    value, bound = (_quantity(result.objective, v) for v in (result.value, result.bound))
    what = " ".join(w for w in result.objective.split() if w not in ("bytes", "seconds"))
    return f"{what} {value}" + ("" if result.status == "optimal" else f" (bound {bound})")


def _quantity(objective: str, value: float) -> str:
    """An objective's value in the unit that its name states."""
    if "bytes" in objective.split():
        return size(value)
    return seconds(value) if "seconds" in objective.split() else f"{value:g}"


def time_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """Equation 1 of the paper, predicted: what is hidden, what could be at most, what a step takes."""
    t = plan.summary.times
    hidden = max(t.serial_s - t.step_s - t.hidden_post_s, 0.0)
    parts = (
        f"decode {seconds(t.decode_s)}",
        f"prefix {seconds(t.prefix_s)}",
        f"hidden {_of(hidden, t.saving_bound_s)}",
        f"post {seconds(t.post_s)}",
        f"step {seconds(t.step_s)}",
    )
    streamed = f"{seconds(t.hidden_post_s)} of post hidden too" if t.hidden_post_s else ""
    if t.streamed_s is not None and t.streamed_s < t.step_s:
        gain = t.step_s / t.streamed_s
        streamed = f"schedule=streamed {seconds(t.streamed_s)}, {gain:.2f}x of this, where it fits"
    more = (
        f"serial {seconds(t.serial_s)}, {t.speedup_vs_serial:.2f}x",
        f"decode slowed by {seconds(t.interference_s)}",
        f"transfers not hidden {seconds(t.exposed_transfer_s)}",
        *(
            (f"gradients leave beside their backward: {seconds(t.hidden_offload_s)} less",)
            if t.hidden_offload_s
            else ()
        ),
        *((streamed,) if streamed else ()),
    )
    first, *rest = [*joined(parts, width - LABEL, "  "), *joined(more, width - LABEL, "  ")]
    return [*_raw("time", first), *(text for part in rest for text in _raw("", part))]


def _of(part: float, most: float) -> str:
    """`16.6 of at most 16.6 s`."""
    return f"{seconds(part).removesuffix(' s')} of at most {seconds(most)}"


def turn_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """What of a trajectory stays where it is, and every turn's decode and prefixes; nothing where there is one turn."""
    told, times = plan.summary.trajectories, plan.summary.times
    if told is None:
        return []
    head = f"{told.turns} of at most {told.tokens} tokens; the environment takes {seconds(times.environment_s)} between"
    stays = f"a trajectory stays on its rollout engine ({', '.join(told.kept)}) and on its training rank"
    each = [f"{i}: decode {seconds(t.decode_s)}, prefix {seconds(t.prefix_s)}" for i, t in enumerate(times.turns, 1)]
    rows = (stays, *(", ".join(names) for names in told.pieces.values()), *joined(each, width - LABEL, "   "))
    return labelled("turns", head, width) + [text for row in rows for text in under(row, width)]


def warning_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """What a reader should know before trusting the plan; the job's own notes first."""
    lines: list[Text] = []
    for text in _distinct((*job_of(plan).notes(), *plan.summary.warnings)):
        lines += labelled("" if lines else "warnings", text, width, "yellow")
    return lines


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
