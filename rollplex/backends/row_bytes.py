"""Where rows of a matrix may begin for a GPU's fast kernels: at multiples of 16 bytes.

missing(3420, 2) == 4                       elements behind a row
odd_mlp_bytes(1280, 3420, 2) == 26_296_320  the weights of such an MLP once more: gate and up joined, down padded
"""

from __future__ import annotations

ROW_BYTES = 16


def missing(width: int, itemsize: int) -> int:
    """Elements of `itemsize` bytes from the end of a row of so many to where the next may begin."""
    return -width % (ROW_BYTES // itemsize)


def odd_mlp_bytes(hidden: int, ffn: int, itemsize: int) -> int:
    """Copies of an MLP's weights whose rows begin where they may; none where they do."""
    more = missing(ffn, itemsize)
    return 3 * hidden * (ffn + more) * itemsize if more else 0
