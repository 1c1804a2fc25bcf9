"""Every solver's maths once more, by enumeration, and what happens when one of its constraint families is taken away.

An oracle draws small instances and says where a model disagrees with the enumeration: in its optimum, in what its own
solution is worth, or in whether one assignment is legal and what that is worth. `ORACLES` has one row a solver.
"""

from oracles.base import Catch, Oracle, catches
from oracles.chunk_sizes import CHUNK_SIZES
from oracles.host_pool import HOST_POOL
from oracles.layout import LAYOUT, LAYOUT_AUTO
from oracles.residency import RESIDENCY

__all__ = ["ORACLES", "Catch", "Oracle", "catches"]

ORACLES: tuple[Oracle, ...] = (RESIDENCY, CHUNK_SIZES, LAYOUT, LAYOUT_AUTO, HOST_POOL)
