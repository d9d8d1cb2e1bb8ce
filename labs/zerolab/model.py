"""The decoder that the labs train: a page of plain PyTorch with the module tree of a real one.

The tree and the call order are those of transformers' `Qwen2ForCausalLM`, with LoRA those of peft's wrapper around it, since
DeepSpeed hangs a hook on every module and its schedule follows their order (a test compares the two). Weights are random.

`SIZES` holds shapes of published models. `build(size="qwen2.5-14b", scale=32)` divides every width by 32: the same tree with
1/1024 of the elements in each matrix, the course's wind tunnel.

torch is imported on first use, so that a notebook can read `SIZES` and `shape()` without it.
"""

from __future__ import annotations

from functools import cache

# Widths as in each model's config.json (Qwen2.5 technical report, arXiv:2412.15115, table 1; Llama as in arXiv:2407.21783).
SIZES = {
    "qwen2.5-0.5b": dict(hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2, vocab=151936, tied=True),
    "qwen2.5-7b": dict(hidden=3584, ffn=18944, layers=28, heads=28, kv_heads=4, vocab=152064),
    "qwen2.5-14b": dict(hidden=5120, ffn=13824, layers=48, heads=40, kv_heads=8, vocab=152064),
    "qwen2.5-72b": dict(hidden=8192, ffn=29568, layers=80, heads=64, kv_heads=8, vocab=152064),
    "llama-3-8b": dict(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, bias=False),
    "1b": dict(hidden=2048, ffn=5632, layers=22, heads=16, kv_heads=4, vocab=32000, bias=False),
    "tiny": dict(hidden=256, ffn=1024, layers=8, heads=4, kv_heads=4, vocab=512, bias=False),
}
CHECKPOINTING = (None, "non-reentrant", "reentrant", "non-reentrant-call", "reentrant-call")


def shape(size: str = "tiny", scale: int = 1, **changes) -> dict:
    """The widths of a named model divided by `scale` (heads stay, their width shrinks), with `changes` on top.

    Raises KeyError for an unknown name, ValueError when a width does not divide.
    """
    if size not in SIZES:
        raise KeyError(f"unknown model size {size!r}; known: {', '.join(SIZES)}")
    widths = {"bias": True, "tied": False, **SIZES[size]}
    if scale > 1:
        if widths["hidden"] % scale or widths["ffn"] % scale or widths["vocab"] % scale:
            raise ValueError(f"the widths of {size} do not divide by {scale}")
        head = widths["hidden"] // widths["heads"]
        kv = widths["kv_heads"] * head // scale
        hidden = widths["hidden"] // scale
        # Head widths stay even (rotary embedding): keep the projections' sizes exact and let the number of heads follow.
        heads = next(h for h in range(widths["heads"], 0, -1) if hidden % h == 0 and hidden // h % 2 == 0 and kv % (hidden // h) == 0)
        widths.update(hidden=hidden, ffn=widths["ffn"] // scale, vocab=widths["vocab"] // scale, heads=heads, kv_heads=kv // (hidden // heads))
    return {**widths, **changes}


def build(size: str = "tiny", scale: int = 1, lora: int = 0, checkpointing: str | None = None, **changes):
    """The decoder as an `nn.Module`; `module(ids)` is the mean next-token loss, `module.batch(...)` makes its input.

    lora: rank of the adapters on every linear layer but `lm_head` (0 trains everything).
    checkpointing: one of `CHECKPOINTING`; "…-call" wraps the layer's call as hand-written code and transformers 4 do, without it
    the checkpoint lies inside the layer's `forward`, as in transformers 5.
    changes: any width of `shape()`.
    """
    if checkpointing not in CHECKPOINTING:
        raise ValueError(f"checkpointing must be one of {CHECKPOINTING}, not {checkpointing!r}")
    return _decoder()(**shape(size, scale, **changes), lora=lora, checkpointing=checkpointing)


@cache
def _decoder():
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    class LoraLinear(nn.Module):
        """peft's `lora.Linear`: the frozen layer, a dropout that is an Identity, then A and B."""

        def __init__(self, inputs, outputs, bias, rank):
            super().__init__()
            self.base_layer = nn.Linear(inputs, outputs, bias=bias)
            self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
            self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})

        def forward(self, x):
            y, a, b = self.base_layer(x), self.lora_A["default"], self.lora_B["default"]
            # peft casts the input and so reads A's weight from outside A: DeepSpeed gathers it here, as an external parameter.
            x = x.to(a.weight.dtype)
            return y + 2.0 * b(a(self.lora_dropout["default"](x)))

    class RMSNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            y = x.float()
            return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    class RotaryEmbedding(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head = head

        @torch.no_grad()
        def forward(self, x):
            inverse = 1e6 ** -(torch.arange(0, self.head, 2, device=x.device) / self.head)
            angle = torch.outer(torch.arange(x.shape[1], device=x.device), inverse)
            angle = torch.cat((angle, angle), -1)
            return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def rotate(x, cos, sin):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    class Attention(nn.Module):
        def __init__(self, linear, hidden, heads, kv_heads, bias):
            super().__init__()
            self.head = hidden // heads
            self.q_proj = linear(hidden, hidden, bias)
            self.k_proj = linear(hidden, kv_heads * self.head, bias)
            self.v_proj = linear(hidden, kv_heads * self.head, bias)
            self.o_proj = linear(hidden, hidden, False)
            self.grouped = kv_heads != heads

        def forward(self, x, rotary):
            def split(y):
                return y.unflatten(-1, (-1, self.head)).transpose(1, 2)

            q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
            q, k = rotate(q, *rotary), rotate(k, *rotary)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
            return self.o_proj(y.transpose(1, 2).flatten(2))

    class MLP(nn.Module):
        def __init__(self, linear, hidden, ffn):
            super().__init__()
            self.gate_proj, self.up_proj = linear(hidden, ffn, False), linear(hidden, ffn, False)
            self.down_proj = linear(ffn, hidden, False)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self, linear, hidden, ffn, heads, kv_heads, bias, checkpointing):
            super().__init__()
            self.self_attn = Attention(linear, hidden, heads, kv_heads, bias)
            self.mlp = MLP(linear, hidden, ffn)
            self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)
            self.inside = checkpointing if checkpointing in ("reentrant", "non-reentrant") else None

        def forward(self, x, rotary):
            if self.inside:
                return checkpoint(self.body, x, rotary, use_reentrant=self.inside == "reentrant")
            return self.body(x, rotary)

        def body(self, x, rotary):
            # By keyword, as transformers does: DeepSpeed's hook on inputs sees positional ones only.
            x = x + self.self_attn(x=self.input_layernorm(x), rotary=rotary)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Model(nn.Module):
        def __init__(self, linear, hidden, ffn, layers, heads, kv_heads, vocab, bias, checkpointing, frozen):
            super().__init__()
            self.embed_tokens = nn.Embedding(vocab, hidden)
            self.layers = nn.ModuleList(
                Layer(linear, hidden, ffn, heads, kv_heads, bias, checkpointing) for _ in range(layers)
            )
            self.norm = RMSNorm(hidden)
            self.rotary_emb = RotaryEmbedding(hidden // heads)
            self.call = checkpointing if checkpointing and checkpointing.endswith("-call") else None
            if frozen and checkpointing:  # transformers' enable_input_require_grads()
                self.embed_tokens.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

        def forward(self, ids):
            x = self.embed_tokens(ids)
            rotary = self.rotary_emb(x)
            for layer in self.layers:
                if self.call:
                    x = checkpoint(layer, x, rotary, use_reentrant=self.call == "reentrant-call")
                else:
                    x = layer(x, rotary)
            return self.norm(x)

    class Inner(nn.Module):
        """peft calls the causal model's `forward`, not the module: its own hooks never fire."""

        def __init__(self, model, head):
            super().__init__()
            self.model, self.lm_head = model, head

        def forward(self, ids):
            logits = self.lm_head(self.model(ids)).float()
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    class Adapter(nn.Module):
        """peft's two wrappers (`PeftModel`, `LoraModel`), each one more module with hooks."""

        def __init__(self, name, inner, call):
            super().__init__()
            setattr(self, name, inner)
            self.inner = [inner.forward if call == "forward" else inner]  # in a list: not a second registration

        def forward(self, ids):
            return self.inner[0](ids)

    def decoder(*, hidden, ffn, layers, heads, kv_heads, vocab, bias, tied, lora, checkpointing):
        def linear(i, o, b):
            return LoraLinear(i, o, b, lora) if lora else nn.Linear(i, o, bias=b)

        model = Model(linear, hidden, ffn, layers, heads, kv_heads, vocab, bias, checkpointing, bool(lora))
        module = Inner(model, nn.Linear(hidden, vocab, bias=False))
        if tied:
            module.lm_head.weight = model.embed_tokens.weight
        if lora:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_("lora_" in name)
            module = Adapter("base_model", Adapter("model", module, "forward"), "call")

        def batch(micro_batch, seq, device, seed):
            generator = torch.Generator().manual_seed(seed)
            return (torch.randint(vocab, (micro_batch, seq), generator=generator).to(device),)

        module.batch = batch
        return module

    return decoder
