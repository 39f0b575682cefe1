"""Traces made by arithmetic, shaped as a decoder's are: for tests of planning that need no torch."""

from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, TracedParam, kept_among


def decoder_trace(
    *,
    hidden: int = 64,
    layers: int = 4,
    intermediate: int | None = None,
    kv: int | None = None,
    vocab: int = 1000,
    tokens: int = 128,
    checkpointing: bool = False,
    frozen: bool = False,
    precision: str = "bf16",
    kept_blocks: int = 0,
) -> MemoryTrace:
    """Llama's shapes: one moment per module with params, forward, (recomputed,) and backward.

    Activations grow by ``34 * hidden`` bytes per token and layer (by ``2 * hidden`` with checkpointing, but for
    ``kept_blocks`` of them, of which all may be offloaded), fall again in backward; work is two FLOP per param and
    token in forward and four in backward.
    """
    intermediate, kv = intermediate or 4 * hidden, kv or hidden
    params: list[TracedParam] = [TracedParam(("model.embed_tokens.weight",), (vocab, hidden), not frozen)]
    shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    for layer in range(layers):
        params += [
            TracedParam((f"model.layers.{layer}.{name}.weight",), shape, not frozen) for name, shape in shapes.items()
        ]
    params += [TracedParam(("model.norm.weight",), (hidden,)), TracedParam(("lm_head.weight",), (vocab, hidden))]
    each = len(shapes)
    moments: list[Moment] = []
    live = 0

    def add(phase: Phase, index: int, grows: int, *, work: int = 2, saved: int = 0, restored: int = 0) -> None:
        nonlocal live
        param = params[index]
        live += grows
        moments.append(
            Moment(
                phase,
                param.name.removesuffix(".weight"),
                (index,),
                live_bytes=live,
                peak_bytes=live + max(-grows, 0) + tokens * hidden * 4,
                saved_bytes=saved,
                restored_bytes=restored,
                flops=work * param.numel * tokens if len(param.shape) == 2 else 0,
                touched_bytes=2 * param.numel + 8 * tokens * hidden,
                num_ops=work,
                gradients=(index,) if phase is Phase.BACKWARD and param.trainable else (),
            )
        )

    recomputed = {*range(layers)} - {*kept_among(layers, kept_blocks)} if checkpointing else set[int]()
    whole, kept = 34 * tokens * hidden // each, 2 * tokens * hidden
    add(Phase.FORWARD, 0, kept)
    for layer in range(layers):
        for n in range(each):
            first = n == 0
            grows = (kept if first else 0) if layer in recomputed else whole
            saved = grows if checkpointing else 0
            add(Phase.FORWARD, 1 + layer * each + n, grows, saved=saved)
    last = len(params) - 1
    for index in (last - 1, last):
        add(Phase.FORWARD, index, kept)
    for index in (last, last - 1):
        add(Phase.BACKWARD, index, -kept, work=4)
    for layer in reversed(range(layers)):
        if layer in recomputed:
            for n in range(each):
                add(Phase.RECOMPUTE, 1 + layer * each + n, whole, restored=kept if n == 0 else 0)
        for n in reversed(range(each)):
            extra = kept if layer in recomputed and n == 0 else 0
            restored = whole if checkpointing and layer not in recomputed else 0
            add(Phase.BACKWARD, 1 + layer * each + n, -whole - extra, work=4, restored=restored)
    add(Phase.BACKWARD, 0, -kept, work=0)
    return MemoryTrace(
        model="Decoder",
        precision=precision,
        batch={"input_ids": (1, tokens)},
        tokens=tokens,
        target="cpu",
        source=Source.AHEAD,
        params=tuple(params),
        moments=tuple(moments),
        buffer_bytes=1024,
        checkpointing=checkpointing,
        kept_blocks=min(kept_blocks, layers) if checkpointing else 0,
    )


def llama_70b(tokens: int = 4096, *, checkpointing: bool = True) -> MemoryTrace:
    return decoder_trace(
        hidden=8192, layers=80, intermediate=28672, kv=1024, vocab=32000, tokens=tokens, checkpointing=checkpointing
    )
