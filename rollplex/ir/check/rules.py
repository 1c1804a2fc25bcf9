"""Every rule that a plan must keep: its id, what it says, where it comes from, and what to try when it is broken.

Violation("not-mapped", "it reads reference.weights, which is not mapped", At("train", 4, ..), "reference.weights")
train step 4 (run prefix reference mb 0) in P1 prefix-reference: it reads reference.weights, which is not mapped
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.errors import Problem
from rollplex.ir.steps import Step, describe


@dataclass(frozen=True)
class Rule:
    """One rule: a sentence, its source (a section of design.md or of the paper), and what to try."""

    says: str
    source: str
    hint: str


COMPILE_AGAIN = "compile the plan again; a pass that writes such a plan has a bug"
_FETCH = "map or fetch it before this step, or move the step that released it behind this one"

RULES: dict[str, Rule] = {
    # ---- form
    "schema": Rule("the plan has the schema version that this program reads", "design 5", COMPILE_AGAIN),
    "unknown-name": Rule("steps name objects, windows and processes of the plan", "design 5", COMPILE_AGAIN),
    "duplicate-name": Rule("names are unique, and lists name nothing twice", "design 5", COMPILE_AGAIN),
    "not-owner": Rule("only the owner of an object moves or writes it", "paper 3.2", COMPILE_AGAIN),
    "not-imported": Rule(
        "a process touches its own objects and those it imports", "paper 3.2", "list the process among its readers"
    ),
    "window-order": Rule("a program runs through the windows in order, without going back", "design 2", COMPILE_AGAIN),
    "barrier": Rule("every program meets the three barriers, each once", "paper 3.1", "restore the barrier"),
    "phase": Rule("steps stand between the barriers of their window's phase", "paper 3.1", COMPILE_AGAIN),
    "after-published": Rule("an iteration ends at the barrier published", "paper 3.1", "end the program there"),
    # ---- the job and the graph
    "asked": Rule("the plan has the capacities, engines, degrees and roles of its job", "design 1", COMPILE_AGAIN),
    "size": Rule("an object has the bytes that its job's model and work give it", "paper table 3", COMPILE_AGAIN),
    "class": Rule("an object's class is that of what it holds", "paper 3.2", COMPILE_AGAIN),
    "degrees": Rule("degrees that were chosen are the job's, the best of legal ones", "style 5", COMPILE_AGAIN),
    "graph": Rule("the graph is in order, its phases, updates and hosts are those done", "design 3", COMPILE_AGAIN),
    "loss": Rule("the loss, taken apart by prompt group, is the loss of the graph", "paper 3.2", COMPILE_AGAIN),
    # ---- order
    "collective-order": Rule(
        "all programs enter barriers and exchanges in the same order", "design 4", "enter them in one order"
    ),
    "event": Rule("an event is signalled once, and each waiter waits for it once", "design 5", COMPILE_AGAIN),
    "unheard-signal": Rule("somebody waits for every signal", "design 5", "restore the wait, or drop the signal"),
    "deadlock": Rule("every wait ends", "design 6", "signal before waiting for what depends on the signal"),
    "missing-value": Rule("a value is made or received before it is used", "design 4", "wait for its event"),
    "missing-input": Rule("a task takes the values that its graph node needs", "design 4", "correct its inputs"),
    "suffix-before-rollout": Rule(
        "what depends on responses runs after barrier rollout-complete", "paper 3.1", "move it behind the barrier"
    ),
    "group-order": Rule(
        "a group is worked on with its own responses, and gradients add up in the order of groups",
        "paper 3.2",
        COMPILE_AGAIN,
    ),
    "race": Rule(
        "no page changes while another process may use it", "paper 3.1", "order the two steps by an event"
    ),
    "import-start": Rule(
        "what a process imports has pages when an iteration starts, and is bound",
        "design 6",
        "let the reader unmap it before it maps it again",
    ),
    "imported-pages": Rule(
        "an owner keeps the pages that others have imported", "paper 3.2, 3.3", "let the readers unmap them first"
    ),
    # ---- residency
    "not-mapped": Rule("what a step uses in HBM is mapped", "design 4", _FETCH),
    "not-produced": Rule("what a step reads has been produced", "design 4", "fetch it, or run its producer first"),
    "dropped-needed": Rule(
        "what was dropped is made again before its next use", "paper 3.2", "keep it, or make it again before this step"
    ),
    "double-map": Rule("what is mapped is not mapped again", "design 4", "drop this step, or unmap it before"),
    "not-held": Rule("only what is mapped is unmapped, offloaded or dropped", "design 4", "drop this step"),
    "no-host-copy": Rule(
        "what comes over the host link has a valid host copy", "paper 3.2", "offload it, or stream it out, before"
    ),
    "offload-undefined": Rule("only produced contents are offloaded", "paper 3.2", "run its producer first"),
    "permanent-lost": Rule("permanent state is never discarded", "paper 3.2", "offload it instead"),
    "boundary-moved": Rule(
        "a boundary stays in HBM from production to its last use", "paper 3.2", "release it behind its last use"
    ),
    "frozen-written": Rule("frozen weights are not written", "design 2", "update a role that is trained"),
    "write-outside-update": Rule(
        "snapshots and optimizer state are written by the update alone", "paper 3.1", COMPILE_AGAIN
    ),
    "start-state": Rule("an object can be where the plan says it starts", "design 5", COMPILE_AGAIN),
    "end-state": Rule(
        "an iteration leaves every object where it found it", "design 5", "move it back before barrier published"
    ),
    # ---- work
    "microbatch": Rule("every prompt group is worked on exactly once by each task", "paper 3.2", COMPILE_AGAIN),
    "slot": Rule("an object has a slot for every microbatch that uses it", "design 5", COMPILE_AGAIN),
    "one-group": Rule(
        "a prefix that runs with its group does so right before the group's train step, when no other has its room",
        "paper 3.2",
        COMPILE_AGAIN,
    ),
    "task-order": Rule("a group's tasks follow each other: prefix, suffix, backward", "paper 3.2", COMPILE_AGAIN),
    "attached": Rule("a trained role's boundary is attached, a frozen role's detached", "paper 3.1", COMPILE_AGAIN),
    "node": Rule("a task executes a node of the graph, of its own kind and role", "design 4", COMPILE_AGAIN),
    "once": Rule("data, responses and host functions are made once an iteration", "design 2", COMPILE_AGAIN),
    "task-objects": Rule("a task uses its role's weights, boundary and gradients", "paper 3.2", COMPILE_AGAIN),
    "saved-state": Rule(
        "the saved state of an attached prefix is kept, offloaded or recomputable until its backward",
        "paper 3.2",
        "keep it in HBM, stream it to the host, or plan it as recomputable",
    ),
    "tail": Rule(
        "of the prompt groups sampled the taken are worked on, and the unfinished kept", "paper 4.7", COMPILE_AGAIN
    ),
    "round": Rule(
        "every round samples for the prompts that those before it found, and judges them by the loss's mask",
        "DAPO 3.2",
        COMPILE_AGAIN,
    ),
    "trajectory": Rule(
        "a trajectory's turns follow each other on one engine and one rank, on all that they go on from",
        "paper 5",
        COMPILE_AGAIN,
    ),
    # ---- capacity
    "capacity": Rule("HBM holds what is mapped in every order of steps", "design 4", "offload more, or lower budgets"),
    "host-capacity": Rule(
        "the pinned pool holds what is at the host in every order of steps", "design 4", "keep more in HBM"
    ),
    "node-memory": Rule(
        "a node's host memory is summed up: pools, processes, the batch", "design 6", COMPILE_AGAIN
    ),
    "pool": Rule(
        "who shares pages shares GPUs, and every pool is summed up", "paper 4.2", COMPILE_AGAIN
    ),
    "host-offset": Rule("what is ever at the host has one place in the pinned pool", "design 6", COMPILE_AGAIN),
    "host-overlap": Rule(
        "what is at the host together lies at different addresses", "design 6", "give one of them another offset"
    ),
    # ---- update and publication
    "update-before-quiet": Rule(
        "the update begins after barrier theta-quiet", "paper 3.1", "move it behind the barrier"
    ),
    "read-after-quiet": Rule(
        "nothing reads theta_k after barrier theta-quiet", "paper 3.1", "move it before the barrier"
    ),
    "gradient-final": Rule(
        "gradients are complete, reduced and their norm known before the first chunk", "paper 3.2", COMPILE_AGAIN
    ),
    "piece": Rule(
        "gradients leave in whole pages, each byte once, beside the backward that ends them", "paper 3.2", COMPILE_AGAIN
    ),
    "part": Rule(
        "pages of a released snapshot come, and those of its gradients go, in whole pages", "paper 3.2", COMPILE_AGAIN
    ),
    "released": Rule(
        "what has no other copy is discarded only if chunks write it again from FP32 masters",
        "paper 3.2",
        "keep it in HBM: optimizer.snapshot=keep",
    ),
    "handed-out": Rule(
        "new pages are handed out once to each process that imports them, and stay then", "paper 3.2", COMPILE_AGAIN
    ),
    "chunk-cover": Rule("chunks cover the flat parameters exactly once, in order", "paper 3.2", COMPILE_AGAIN),
    "chunk-size": Rule("chunks have the planned size and number", "paper 3.2", COMPILE_AGAIN),
    "chunk-state": Rule(
        "a chunk has gradient, master weights and moments, and writes the snapshot", "paper 3.2", COMPILE_AGAIN
    ),
    "missing-exchange": Rule(
        "ranks exchange what they updated before anybody reads it", "paper 3.3", "restore the exchange"
    ),
    "missing-rebuild": Rule(
        "every copy of the weights is made again from theta_k+1 before it is published", "paper 3.3", "rebuild it"
    ),
    "layout": Rule("ranks are TP x DP, and q is the ratio of the engines' TP", "paper 3.3", COMPILE_AGAIN),
    "publish": Rule("each new snapshot is published exactly once", "paper 3.1", COMPILE_AGAIN),
    "publish-order": Rule(
        "publication comes after every chunk, exchange and rebuild", "paper 3.3", "publish last"
    ),
    # ---- layout
    "layout-cases": Rule("cases, classes and tensors add up to the language model", "paper 3.3", COMPILE_AGAIN),
    "layout-class": Rule("a weight class has the tensors and shards of the model", "paper 3.3", COMPILE_AGAIN),
    "layout-alternative": Rule(
        "other row orders are made of the same classes", "paper 3.3", COMPILE_AGAIN
    ),
    "layout-view": Rule("how a weight class lies says its case", "paper 3.3", COMPILE_AGAIN),
    "layout-buffer": Rule("the case-3 buffer holds the shards of case 3, and nothing else", "paper 3.3", COMPILE_AGAIN),
    "layout-exchange": Rule("what a GPU receives is what its shards lack", "paper 3.3", COMPILE_AGAIN),
    "layout-placement": Rule(
        "GPU g of a training group is rank g // q of one rollout engine", "paper 3.3", COMPILE_AGAIN
    ),
    # ---- summary
    "times": Rule("the predicted times agree with each other", "paper 3.1, equation 1", COMPILE_AGAIN),
    "sharing": Rule(
        "a table of sharing covers decode, has the seconds of the job's surface, and no other is better",
        "paper 4.6",
        COMPILE_AGAIN,
    ),
    "solver": Rule("an optimum meets its bound, anything else is told as not proven", "style 5", COMPILE_AGAIN),
    "window-bytes": Rule("a window's bytes are those of the objects mapped in it", "design 9", COMPILE_AGAIN),
    "host-bytes": Rule("a window's host bytes are those of the objects at the host in it", "design 9", COMPILE_AGAIN),
    "peak": Rule("the peak is the largest window", "design 9", COMPILE_AGAIN),
    "residency-table": Rule("the state contract says where objects are", "paper table 3", COMPILE_AGAIN),
    "uses-table": Rule("the state contract says who produces and uses objects", "paper table 3", COMPILE_AGAIN),
    "feasible": Rule("the verdict agrees with capacity", "design 4", COMPILE_AGAIN),
    "infeasible": Rule("an infeasible plan names the first window over capacity", "design 4", COMPILE_AGAIN),
}  # fmt: skip


@dataclass(frozen=True)
class At:
    """A step of a program, for messages."""

    process: str
    index: int
    step: Step

    def __str__(self) -> str:
        return f"{self.process} step {self.index} ({describe(self.step)}) in {self.step.window}"


@dataclass(frozen=True)
class Violation:
    """One rule broken in one place; where no single step is to blame, `at` is None and `where` names the place."""

    kind: str
    what: str
    at: At | None = None
    object: str = ""
    nbytes: int = 0
    where: str = "plan"

    def __post_init__(self) -> None:
        assert self.kind in RULES, f"no rule {self.kind}"

    @property
    def problem(self) -> Problem:
        """The violation as users read it."""
        rule = RULES[self.kind]
        what = f"{self.what}\n    rule {self.kind}: {rule.says} ({rule.source})"
        return Problem(what, str(self.at or self.where), rule.hint)

    def __str__(self) -> str:
        return str(self.problem)


def amount(nbytes: int) -> str:
    """Bytes for a message: `29.00 GiB`; less than a quarter of one in bytes."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes:,} bytes"
