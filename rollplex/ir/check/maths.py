"""What the name of a tensor op alone tells: whether its result still has a row for each prompt, or mixes prompts.

operator.mul(%a, %b)      a row where a or b has one        torch.mean(%x)       none: all rows in one number
Tensor.sum(%x, -1)        not known without the rank of x   rx.masked_mean(..)   none
The prompt dim comes first in every tensor that has one (types.DIMS), so dim 0 is it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollplex.ir.check.graph import inputs
from rollplex.ir.plan import NodeRecord

Known = bool | None
"""None where names do not tell."""
Rows = Mapping[str, Known]

SUMS, MEANS = ("torch.sum", "Tensor.sum"), ("torch.mean", "Tensor.mean")
ADDS = ("operator.add", "torch.add", "Tensor.add", "operator.sub", "torch.sub", "Tensor.sub")
OVER_MASK = ("rx.masked_mean", "rx.masked_sum")
DIVIDES = (
    *("rx.portion", "operator.truediv", "torch.div", "Tensor.div", "torch.divide", "Tensor.divide"),
    "torch.true_divide",
)
COUNTS = ("rx.mask_count", "rx.rows")
_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "prod",
        "std",
        "var",
        "amax",
        "amin",
        "logsumexp",
        "nansum",
        "nanmean",
        "argmax",
        "argmin",
        "any",
        "all",
        "count_nonzero",
    ]
)
_SCANS = frozenset(["cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "flip"])
_SHAPES = frozenset(("squeeze", "getitem"))


def short(record: NodeRecord) -> str:
    """`mean` of `torch.mean` and `Tensor.mean`; an op of ours keeps its whole name."""
    return record.op if record.op.startswith("rx.") else record.op.rsplit(".", 1)[-1]


def over_prompts(record: NodeRecord) -> Known:
    """Whether the dims that a reduction or scan works along have the prompt's among them; all dims if none is named."""
    second = record.args[1] if len(record.args) > 1 else None
    dim = record.kwargs.get("dim", record.kwargs.get("dims", second))
    if dim is None or isinstance(dim, bool):
        return True
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    if 0 in dims:
        return True
    return False if all(isinstance(d, int) and d > 0 for d in dims) else None


def any_rows(record: NodeRecord, rows: Rows) -> Known:
    """Whether an input has a row for each prompt; calls and inputs of the iteration have."""
    found = {rows.get(name, True) for name in inputs(record)}
    return True if True in found else None if None in found else False


def rows_of(record: NodeRecord, rows: Rows) -> Known:
    """Whether the result of maths has a row for each prompt."""
    had = any_rows(record, rows)
    if had is False or record.op in (*OVER_MASK, *COUNTS):
        return False
    if short(record) in _REDUCTIONS:
        return None if had is None else _not(over_prompts(record))
    return None if short(record) in _SHAPES else had


def mixes(record: NodeRecord, rows: Rows) -> Known:
    """Whether one row of the result takes the rows of other prompts."""
    had = any_rows(record, rows)
    if had is False:
        return False
    if record.op in (*OVER_MASK, *COUNTS):
        return had
    if record.op.startswith("rx."):
        return False
    if short(record) in _SCANS:
        return over_prompts(record) if had else None
    kept = rows_of(record, rows)
    return None if kept is None or had is None else not kept


def _not(known: Known) -> Known:
    return None if known is None else not known
