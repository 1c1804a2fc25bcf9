"""One rank of a Megatron model over memory of the caller: what a training or scoring process calls.

rank = MegatronModel(spec, torch.bfloat16, {"language": snapshot, "vision": tower}, group, Stored.planned(layout))
rank.accumulate(FlatGradients(flat))                          from now on gradients go there
prefix = rank.prefix(prompt, slot, attached=True)             keys and values of this rank's heads
kv = boundary_leaf(prefix.kv)
loss(rank.logprobs(prefix, kv, responses, 1.0)).backward()    down to the boundary
rank.prefix_backward(prefix, kv.grad)                         the rest
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.megatron import gradients, memory, weights
from rollplex.backends.megatron.groups import Alone, Group
from rollplex.backends.megatron.memory import Slab
from rollplex.backends.megatron.model import build_model
from rollplex.backends.megatron.names import Parameter, Stored, parameters
from rollplex.backends.megatron.prefix import boundary_shape, run_prefix
from rollplex.backends.megatron.suffix import suffix_logprobs
from rollplex.backends.training.boundary import Begins, PrefixResult, prefix_backward
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.saved import SavedPolicy
from rollplex.ir.spec import ModelSpec, Part

PARTS: tuple[Part, ...] = ("language", "vision")
Responses = Sequence[Tensor]


class MegatronModel:
    """A role's model on one tensor-parallel rank; every parameter is a view of `pages`.

    `pages` has flat memory for each part: the language part holds `slab.of` ranks' shares, tensor by tensor, of which
    `slab.index` is this rank's; the tower is whole. Parts in `frozen` get no gradient; `group` is None for one rank.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        pages: Mapping[Part, Tensor],
        group: Group | None = None,
        stored: Stored | None = None,
        slab: Slab | None = None,
        frozen: Iterable[Part] = (),
        sequence_parallel: bool = False,
    ) -> None:
        self.spec = spec
        self.group: Group = group or Alone()
        self.stored = stored or Stored()
        self.frozen = frozenset(frozen)
        device = pages["language"].device
        if device.type == "cuda":
            from rollplex.backends.cuda import fused, one_sequence  # Triton is there where a GPU is

            fused.check_kernels(device)
            one_sequence.check(device)
        self.model = build_model(spec, dtype, self.group, self.stored, sequence_parallel, device)
        self.order = parameters(self.spec, self.group.size(), self.group.rank(), self.stored)
        slabs = {"language": slab or Slab(), "vision": Slab()}
        self.views: dict[str, Tensor] = {}
        for part in PARTS:
            self.views |= memory.views(pages[part], self.of(part), slabs[part])
        memory.bind(self.model, self.order, self.views)
        for parameter in (p for p in self.order if p.part in self.frozen):
            self.model.get_parameter(parameter.name).requires_grad_(False)

    def of(self, part: Part) -> tuple[Parameter, ...]:
        """The parameters of one part in their order in memory."""
        return tuple(p for p in self.order if p.part == part)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that an update changes, in the flat order of gradients, master weights and moments."""
        return tuple(p for p in self.order if p.part not in self.frozen)

    @property
    def counted(self) -> tuple[Parameter, ...]:
        """The trained parameters that this rank counts in the gradient's norm; over all ranks, each element once."""
        return gradients.counted(self.trained, self.group.rank())

    def save(self, directory: str | Path) -> None:
        """Write all ranks' weights as a Hugging Face directory; every rank calls it."""
        weights.save_weights(directory, self.spec, self.stored, self.views, self.group)

    def accumulate(self, into: FlatGradients) -> dict[str, Tensor]:
        """Add gradients to flat memory, end to end in the order of `trained`, as they become final; views by name."""
        slabs = memory.views(into.flat, self.trained)
        for name, parameter in self.model.named_parameters():
            if name in slabs:
                into.take(parameter, slabs[name])
        return slabs

    def boundary_shape(self, prefix_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of this rank's boundary slot for one prompt."""
        return boundary_shape(self.spec, self.group.size(), prefix_tokens)

    # ---- tasks

    def prefix(self, prompt: Prompt, slot: Tensor, *, attached: bool, saved: SavedPolicy | None = None) -> PrefixResult:
        """Keys and values of all but the last prompt token, into `slot`."""
        return run_prefix(self.model, prompt, slot, attached=attached, saved=saved)

    def logprobs(
        self, prefix: PrefixResult, kv: Tensor, responses: Responses, temperature: float, *, recompute: bool = False
    ) -> Tensor:
        """Log-probabilities [responses, tokens] over a prefix, the same on every rank, under the caller's grad mode.

        `kv` is `prefix.kv`, or an autograd leaf over it whose gradient `prefix_backward` wants.
        """
        return suffix_logprobs(self.model, kv, prefix.prompt, responses, temperature, recompute=recompute)

    def prefix_backward(self, prefix: PrefixResult, kv_grad: Tensor, begins: Begins = lambda edges: None) -> None:
        """Gradients of the prefix and, unless it is frozen, of the tower; once for each attached prefix."""
        prefix_backward(prefix, kv_grad, begins)
