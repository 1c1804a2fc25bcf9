"""The formulas of workspaces and saved states: the maths of `backends.activations` and `backends.fsdp.facts` in words.

prefix_saved(work, engine)     8192 tokens x 64 layers x layer input,    layer input = 5120 hidden x 2 B / 8

Written from the maths and apart from the facts that plans are made with: `explain` tells one only where both agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollplex.ir.formula import Formula, largest, n, part
from rollplex.ir.spec import VisionSpec
from rollplex.ir.work import Work

NOTHING = n(0, "B")
MOST, ROW = n(2 * 2**30, "B at most"), n(128, "head") * n(4, "B")  # that attention sums apart; of one row of a head


def kv_heads(work: Work) -> Formula:
    """KV heads of one rank."""
    count = max(1, work.spec.kv_heads // work.tp)
    return n(count, "KV heads" if count > 1 else "KV head")


@dataclass(frozen=True)
class Tokens:
    """What one token takes on one rank; `context` is what its query can see."""

    work: Work
    context: int

    @property
    def item(self) -> Formula:
        """Bytes of an element."""
        return n(self.work.itemsize, "B")

    def named(self, name: str, what: Formula) -> Formula:
        """A part under its name; where attention is not fused it depends on the context."""
        return part(f"{name} at {self.context} tokens" if self.work.unfused else name, what)

    def hidden(self, copies: int) -> Formula:
        """Hidden states between the tensor-parallel regions."""
        cut = self.work.tp if self.work.sequence_parallel else 1
        return (n(copies) * n(self.work.spec.hidden, "hidden") * self.item) // cut

    def qkv(self) -> Formula:
        """Queries, keys, values, attention's output."""
        s = self.work.spec
        heads = n(2) * n(s.heads, "heads") + n(2) * n(s.kv_heads, "KV heads")
        return (heads * n(s.head_dim) * self.item) // self.work.tp

    def scores(self) -> Formula:
        """One score of every head for every token of the context, where attention is not fused."""
        if not self.work.unfused:
            return NOTHING
        return (n(self.work.spec.heads, "heads") * n(self.context, "context") * self.item) // self.work.tp

    def attention(self) -> Formula:
        """Saved by attention and the norms around it."""
        kept = self.scores() if self.work.unfused else (n(4, "B") * n(self.work.spec.heads, "heads")) // self.work.tp
        saved = NOTHING if self.work.unfused and self.work.recompute_attention else kept
        return self.named("attention", self.hidden(4) + self.qkv() + saved)

    def dense(self, copies: int = 4) -> Formula:
        """A dense feed-forward."""
        return (n(copies) * n(self.work.spec.ffn, "ffn") * self.item) // self.work.tp

    def moe(self) -> Formula:
        """Routed experts: the router, what is dispatched and returned, and the experts' own."""
        moe = self.work.spec.moe
        if moe is None:
            return NOTHING
        each = n(2) * n(self.work.spec.hidden, "hidden") + (n(4) * n(moe.ffn, "expert ffn")) // self.work.tp
        return n(8, "B") * n(moe.experts, "experts") + n(moe.per_token, "experts a token") * each * self.item

    @property
    def some_dense(self) -> bool:
        """Whether any layer has a dense feed-forward."""
        moe = self.work.spec.moe
        return moe is None or bool(moe.dense_layers)

    def layer(self) -> Formula:
        """Saved by the layer that saves most."""
        feed = largest(self.dense() if self.some_dense else NOTHING, self.moe())
        return self.named("layer", self.attention() + feed)

    def kept(self, count: int) -> Formula:
        """What so many layers keep of a token: their inputs under recomputation, everything otherwise."""
        if self.work.recompute:
            return n(count, "layers") * self.layer_input()
        moe = self.work.spec.moe
        plain = count if moe is None else len(moe.dense_layers) if self.work.pp == 1 else 0
        feed = n(plain, "layers") * self.dense() + n(count - plain, "layers") * self.moe()
        return self.named(f"all {count} layers", n(count, "layers") * self.attention() + feed)

    def last(self) -> Formula:
        """Saved of a prefix's last layer, of which keys and values alone are made, outside a checkpoint; all angles."""
        s, angles = self.work.spec, n(4, "B an angle") * n(self.work.spec.head_dim)
        if not self.work.recompute:
            return angles
        queries = (n(s.heads, "heads") * n(s.head_dim)) // self.work.tp
        norms = n(2) * self.layer_input() + n(2, "norms") * n(4, "B")
        return norms + (queries + n(4) * n(s.head_dim)) * self.item + angles

    def in_flight(self) -> Formula:
        """Gradients in a dense feed-forward's backward: of the product, of gate and of up."""
        return self.dense(3) if self.work.spec.moe is None else NOTHING

    def layer_input(self) -> Formula:
        """What a checkpointed layer keeps."""
        return part("layer input", self.hidden(1))

    def forward(self) -> Formula:
        """Temporaries of one layer's forward."""
        s, work = self.work.spec, self.work
        ring = n(2) * n(2) * kv_heads(work) * n(s.head_dim) * self.item
        attention = self.qkv() + n(2) * self.scores() + (ring if work.cp > 1 else NOTHING)
        inside = largest(attention, self.dense(3) if self.some_dense else NOTHING, self.moe())
        return self.named("layer forward", n(2) * n(s.hidden, "hidden") * self.item + self.hidden(2) + inside)

    def head(self) -> Formula:
        """Logits, their gradient and FP32 copies, and the hidden state around them."""
        s, work = self.work.spec, self.work
        copies = n(2) * self.item + n(4) * n(4, "B")
        logits = (n(s.outputs, "outputs") * copies) // work.tp
        return part("head", logits + n(2) * n(s.hidden, "hidden") * self.item + self.hidden(2))


def patches_bytes(work: Work, copies: tuple[int, int], count: int = 1) -> Formula:
    """The tower over its patches: (a hidden + b ffn) elements each."""
    vision = work.spec.vision
    if vision is None:
        return NOTHING
    a, b = copies
    each = n(a) * n(vision.hidden, "tower hidden") + n(b) * n(vision.ffn, "tower ffn") if b else n(a) * n(vision.hidden)
    return n(count * work.patches, "patches") * each * n(work.itemsize, "B")


# ---- Megatron


def _tokens(count: int) -> Formula:
    return n(count, "tokens")


def _sent(work: Work, tokens: int) -> Formula:
    return n(2) * _tokens(tokens) * Tokens(work, 0).layer_input() if work.pp > 1 else NOTHING


def _head(work: Work, tokens: int) -> Formula:
    return n(min(tokens, 2048), "tokens at a time") * Tokens(work, 0).head()


def megatron_saved(work: Work) -> Formula:
    """Autograd state of one attached prefix."""
    t, vision = Tokens(work, work.prompt_tokens), work.spec.vision
    saved = _tokens(work.local(work.prompt_tokens)) * (t.kept(work.layers) + part("last layer", t.last()))
    if vision is None or not work.vision_grad:
        return saved
    blocks = n(vision.depth, "blocks") * patches_bytes(work, (1, 0) if work.recompute else (8, 4))
    return saved + blocks + n(work.patches, "patches") * part("ends of the tower", tower_ends(work, vision))


def tower_ends(work: Work, vision: VisionSpec) -> Formula:
    """Saved of a patch beside the blocks: pixels, the projector's norm, linears and GELU; FP32 cosines and sines."""
    elements = pixels(vision) + n(4) * n(vision.hidden, "tower hidden")
    angles = n(2) * n(vision.hidden // vision.heads, "tower head") * n(4, "B")
    return elements * n(work.itemsize, "B") + n(4, "B of the norm") + angles


def tower_forward(work: Work) -> Formula:
    """Temporaries of the tower over its patches: pixels, hidden states, gate and up one by one and both together."""
    vision = work.spec.vision
    if vision is None:
        return NOTHING
    each = pixels(vision) + n(5) * n(vision.hidden, "tower hidden") + n(4) * n(vision.ffn, "tower ffn")
    return n(work.patches, "patches") * each * n(work.itemsize, "B") + odd_weights(work, vision)


def odd_weights(work: Work, vision: VisionSpec, copies: int = 1) -> Formula:
    """Gate and up joined, down with zeros behind: where rows of the MLP are no multiple of 16 bytes."""
    row = -(-vision.ffn * work.itemsize // 16) * 16
    if row == vision.ffn * work.itemsize:
        return NOTHING
    return part("odd weights", n(3 * copies) * n(vision.hidden, "tower hidden") * n(row, "B a row"))


def pixels(vision: VisionSpec) -> Formula:
    """Numbers of one patch as the processor gives them."""
    return n(vision.channels, "channels") * n(vision.temporal_patch, "frames") * n(vision.patch) * n(vision.patch)


def megatron_prefix(work: Work, attached: bool) -> Formula:
    """Temporaries of one prefix forward."""
    t, tokens = Tokens(work, work.prompt_tokens), work.local(work.prompt_tokens)
    forward = largest(_tokens(tokens) * t.forward(), tower_forward(work))
    staged = n(2) * _tokens(tokens) * t.layer_input() if attached else NOTHING
    full = _tokens(tokens) * t.layer() if attached and not work.recompute else NOTHING
    return forward + staged + full + _sent(work, tokens)


def megatron_score(work: Work) -> Formula:
    """Temporaries of one suffix forward, the head in pieces."""
    tokens = work.responses * work.local(work.response_tokens)
    layer = Tokens(work, work.prompt_tokens + work.response_tokens).forward()
    return _tokens(tokens) * layer + _head(work, tokens) + _sent(work, tokens)


def megatron_train(work: Work) -> Formula:
    """The larger of a suffix step and a prefix backward, with the boundary's gradient of one group."""
    suffix, prefix = part("suffix step", _suffix(work)), part("prefix backward", _prefix_backward(work))
    return largest(suffix, prefix) + part("boundary gradient", boundary(work))


def _suffix(work: Work) -> Formula:
    tokens = work.responses * work.local(work.response_tokens)
    t = Tokens(work, work.prompt_tokens + work.response_tokens)
    again = (t.layer() if work.recompute else NOTHING) + n(2) * t.scores()
    layer = t.kept(work.layers_in_flight) + again + t.in_flight()
    apart = _sums_apart(work, work.local(work.response_tokens), work.prompt_tokens, work.responses)
    alone = largest(_head(work, tokens), part("suffix sums apart", apart))
    return _tokens(tokens) * layer + alone + _sent(work, tokens)


def _sums_apart(work: Work, queries: int, keys: int, sequences: int = 1) -> Formula:
    """What the backward of fused attention sums apart, by SMs or by blocks of keys: the larger, up to a limit."""
    if work.unfused or not queries:
        return NOTHING
    seen, alone = _by_sms(work, sequences * queries, 1), part("one response alone", _by_sms(work, queries, 1))
    calls = [seen, *(_by_sms(work, count * queries, count) for count in range(2, sequences + 1))]
    whole = max(calls, key=lambda call: call.value)
    if whole.value <= MOST.value or sequences == 1:
        return largest(whole, _by_blocks(work, queries * sequences, keys))
    gradients = n(2) * n(keys, "keys") * kv_heads(work) * n(work.spec.head_dim) * n(4, "B")
    run = alone if alone.value > MOST.value else MOST
    return run + (gradients if seen.value > run.value else NOTHING)


def _by_sms(work: Work, queries: int, sequences: int) -> Formula:
    """FlashAttention's: each SM of a head has queries of its own; of every sequence there is a block of rows more."""
    heads = -(-work.spec.heads // work.tp)
    rows = n(heads, "heads") * (_tokens(queries) + n(sequences * 128, "rows"))
    return rows * (n(-(-work.sms // (sequences * heads)), "SMs a head") * ROW + n(4, "B"))


def _by_blocks(work: Work, queries: int, keys: int) -> Formula:
    """cuDNN's: each block of keys has queries of its own, where that is not too much; of a Hopper GPU."""
    if not work.hopper:
        return NOTHING
    heads, rows, columns = -(-work.spec.heads // work.tp), -(-queries // 1024) * 1024, -(-keys // 1024) * 1024
    blocks = n(columns // 256, "blocks of keys") * _tokens(rows) + n(columns, "keys")
    apart = n(heads, "heads") * (blocks * ROW + _tokens(rows) * n(4, "B"))
    return apart if apart.value <= MOST.value else MOST


def _prefix_backward(work: Work) -> Formula:
    t, tokens = Tokens(work, work.prompt_tokens), work.local(work.prompt_tokens)
    layer = t.layer() + n(2) * t.layer_input() + n(2) * t.scores() + t.in_flight()
    vision, moe = work.spec.vision, work.spec.moe is not None
    odd = odd_weights(work, vision, 2) if vision else NOTHING
    tower = patches_bytes(work, (10, (4 if moe else 7) + (1 if odd.value else 0))) + odd
    apart = part("prefix sums apart", _sums_apart(work, tokens, work.prompt_tokens))
    language = _tokens(tokens) * layer + apart + _sent(work, tokens)
    again = part("made again", megatron_saved(work)) if work.dropped else NOTHING
    return again + largest(language, tower if work.vision_grad else NOTHING)


def megatron_whole(work: Work) -> Formula:
    """One sequence of prompt and response, everything saved: the naive overlap."""
    length = work.prompt_tokens + work.response_tokens
    t = Tokens(replace(work, recompute=False), length)
    return _tokens(work.local(length)) * (t.kept(work.layers_in_flight) + t.head())


def boundary(work: Work) -> Formula:
    """Keys and values of one prompt."""
    heads = kv_heads(work) * n(work.spec.head_dim)
    return _tokens(work.local(work.prompt_tokens)) * n(work.layers, "layers") * n(2) * heads * n(work.itemsize, "B")
