"""Who a process of a calibration is: the side it is of, its GPU, its part of the model, and whom it exchanges with.

trainer TP 2, rollout TP 1     GPU 0   prefix, rank 0 of 2     decode, rank 0 of 1
                               GPU 1   prefix, rank 1 of 2     decode, rank 0 of 1
"""

from __future__ import annotations

from pydantic import Field

from rollplex.ir.calibration import Shape
from rollplex.ir.job_section import Count, Positive, Section


class Post(Section):
    """What a process is told when it starts, as one line of JSON."""

    shape: Shape = Field(description="the model")
    decoding: bool = Field(description="it decodes; else it runs prefixes")
    gpu: int = Field(ge=0, description="number of its CUDA device")
    share: Positive = Field(description="of the GPU's memory it may use")
    tp: Count = Field(default=1, description="ranks that cut the model, each in a process like this one")
    rank: int = Field(default=0, ge=0, description="its number among them")
    meeting: str = Field(default="", description="the file in which they meet")
    stretches: bool = Field(default=False, description="between linears a rank keeps a stretch of the tokens")
