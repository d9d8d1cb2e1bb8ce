"""Small models that do everything a schedule can depend on, and hypothesis strategies that draw them.

`build(width, blocks, ...)` follows the factory protocol: a module that returns a scalar loss, with `batch()`. A block is a dict:
    kind: one of KINDS. checkpoint: None, "reentrant" or "non-reentrant" (around the call), "reentrant-inside", "non-reentrant-inside".
    frozen: "none", "all", "weights" or "biases". lora: rank of adapters on its linear layers (0: none). bias: of its linear layers.
    size: inner width. of: index of an earlier block, for "again" (the same module once more) and "tied" (its weight).
vocab: 0 for inputs that are numbers. open_input: make the first hidden state need a gradient, True or by a "hook". tied_head: the
head has the embedding's weight. late: adapters are added after zero.Init, as peft's are; they stay fp32, and only they are trained.
"""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zerolab.predict import capture

KINDS = (
    "linear", "norm", "mlp", "own", "attention", "pair", "keywords", "detached", "peek", "outside", "nested",
    "unused", "twice", "record", "deeper", "opaque", "again", "tied",
)  # fmt: skip
FROZEN = ("none", "all", "weights", "biases")
CHECKPOINTS = (None, "reentrant", "non-reentrant", "reentrant-inside", "non-reentrant-inside")


class LoraLinear(nn.Module):
    """As peft's, with its look at lora_A's dtype before lora_A runs (which makes DeepSpeed gather it there)."""

    def __init__(self, inputs, outputs, bias, rank, late):
        super().__init__()
        self.sizes = inputs, rank, outputs
        self.base_layer = nn.Linear(inputs, outputs, bias=bias)
        self.base_layer.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        if not late:
            self.adapt()

    def adapt(self):
        inputs, rank, outputs = self.sizes
        self.lora_A["default"] = nn.Linear(inputs, rank, bias=False)
        self.lora_B["default"] = nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        result = self.base_layer(x)
        a, b = self.lora_A["default"], self.lora_B["default"]
        x = x.to(a.weight.dtype)
        return (result + b(a(self.lora_dropout["default"](x))) * 2.0).to(result.dtype)


class Block(nn.Module):
    """One residual step: x -> x + f(x)."""

    def __init__(self, width, size=8, bias=True, lora=0, late=False, **_):
        super().__init__()
        self.width, self.size = width, size
        self.linear = lambda i, o: LoraLinear(i, o, bias, lora, late) if lora else nn.Linear(i, o, bias=bias)
        self.fill()

    def forward(self, x):
        return x + self.step(x)


class LinearBlock(Block):
    def fill(self):
        self.fc = self.linear(self.width, self.width)

    def step(self, x):
        return self.fc(x)


class Norm(Block):
    def fill(self):
        self.norm = nn.LayerNorm(self.width) if self.size % 2 else nn.RMSNorm(self.width)

    def step(self, x):
        return self.norm(x)


class Mlp(Block):
    def fill(self):
        self.net = nn.Sequential(self.linear(self.width, self.size), nn.GELU(), self.linear(self.size, self.width))

    def step(self, x):
        return self.net(x)


class Own(Block):
    """Parameters that belong to the block itself, beside a child."""

    def fill(self):
        self.scale = nn.Parameter(torch.ones(self.width))
        self.child = self.linear(self.width, self.size)
        self.matrix = nn.Parameter(torch.ones(self.size, self.width) / self.size)
        self.shift = nn.Parameter(torch.zeros(1))

    def step(self, x):
        return self.child(x * self.scale) @ self.matrix + self.shift


class Attention(Block):
    def fill(self):
        self.norm = nn.LayerNorm(self.width)
        self.q, self.k, self.v = (self.linear(self.width, self.size) for _ in range(3))
        self.o = self.linear(self.size, self.width)

    def step(self, x):
        x = self.norm(x)
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))


class Pair(Block):
    """A child with two inputs and a tuple of two outputs: its hooks run twice."""

    class Two(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x, y):
            return self.a(x), self.b(y)

    def fill(self):
        self.two = self.Two(self.linear(self.width, self.size), self.linear(self.width, self.size))
        self.out = self.linear(self.size, self.width)

    def step(self, x):
        a, b = self.two(x, x * 2)
        return self.out(a * b)


class Keywords(Block):
    """A child called by keyword: DeepSpeed does not see its input, so its post-backward hook never fires."""

    class Scaled(nn.Module):
        def __init__(self, fc):
            super().__init__()
            self.fc = fc

        def forward(self, *, x):
            return self.fc(x)

    def fill(self):
        self.scaled = self.Scaled(self.linear(self.width, self.width))

    def step(self, x):
        return self.scaled(x=x)


class Detached(Block):
    """A branch whose input needs no gradient."""

    def fill(self):
        self.branch = nn.Sequential(self.linear(self.width, self.size), nn.Tanh(), self.linear(self.size, self.width))

    def step(self, x):
        return self.branch(x.detach())


class Peek(Block):
    """Reads a child's parameter before, and another's after, the child runs."""

    def fill(self):
        self.first, self.second = nn.Linear(self.width, self.size), nn.Linear(self.size, self.width)

    def step(self, x):
        x = self.first(x.to(self.second.weight.dtype))
        return self.second(x) * float(len(self.first.weight.shape))


class Outside(Block):
    """Uses a child's weight without calling the child."""

    def fill(self):
        self.embed, self.back = nn.Linear(self.width, self.size, bias=False), nn.Linear(self.size, self.width)

    def step(self, x):
        return F.linear(x, self.embed.weight) @ self.embed.weight + self.back(self.embed(x))


class Nested(Block):
    """Containers in containers, the same child in two of them."""

    def fill(self):
        shared = self.linear(self.width, self.width)
        self.deep = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(shared, nn.Tanh())), "b": nn.Sequential(nn.Identity(), shared)})

    def step(self, x):
        return self.deep["a"](x) + self.deep["b"](x)


class Unused(Block):
    def fill(self):
        self.never = self.linear(self.width, self.size)
        self.fc = self.linear(self.width, self.width)

    def step(self, x):
        return self.fc(x)


class Twice(Block):
    """Calls the same child twice, at once or with a dropout between that does nothing."""

    def fill(self):
        self.fc, self.drop = self.linear(self.width, self.width), nn.Dropout(0.0)

    def step(self, x):
        return self.fc(self.fc(x) if self.size % 2 else self.drop(self.fc(x)))


class Record(Block):
    """Children that take and return containers: a dict, a list of one tensor and a number, None."""

    class Boxed(nn.Module):
        def __init__(self, fc):
            super().__init__()
            self.fc = fc

        def forward(self, box, extra):
            return {"y": self.fc(box["x"]), "x": box["x"], "extra": [extra, None]}

    class Silent(nn.Module):
        def forward(self, x):
            return None

    def fill(self):
        self.boxed, self.silent = self.Boxed(self.linear(self.width, self.width)), self.Silent()

    def step(self, x):
        self.silent(x)
        found = self.boxed({"x": x, "n": 1}, x.mean())
        return found["y"] * found["extra"][0] + found["x"]


class Opaque(Block):
    """A child whose output DeepSpeed cannot see into, so its pre-backward hook never fires: the linear function gathers the weight."""

    class Object(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(outputs, inputs) / inputs)

        def forward(self, x):
            return SimpleNamespace(y=F.linear(x, self.weight))

    def fill(self):
        self.object, self.back = self.Object(self.width, self.size), self.linear(self.size, self.width)

    def step(self, x):
        return self.back(self.object(x).y)


class Deeper(Block):
    """A checkpoint of its own around a child, whatever surrounds the block; the outer child ends in a layer, the inner does not."""

    def fill(self):
        self.inner = nn.Sequential(self.linear(self.width, self.size), nn.SiLU())
        self.outer = self.linear(self.size, self.width)

    def step(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=bool(self.size % 2)))


CLASSES = {
    "linear": LinearBlock, "norm": Norm, "mlp": Mlp, "own": Own, "attention": Attention, "pair": Pair, "keywords": Keywords,
    "detached": Detached, "peek": Peek, "outside": Outside, "nested": Nested, "unused": Unused, "twice": Twice,
    "record": Record, "deeper": Deeper, "opaque": Opaque, "tied": LinearBlock,
}  # fmt: skip


def _step(block, mode):
    """The call of a block as a forward makes it, under its checkpointing."""
    if mode in ("reentrant", "non-reentrant"):
        return lambda x: checkpoint(block, x, use_reentrant=mode == "reentrant")
    return block


class Model(nn.Module):
    def __init__(self, width, blocks, vocab=0, open_input=False, tied_head=False, late=False):
        super().__init__()
        self.width, self.vocab, self.open_input = width, vocab, open_input
        self.embed = nn.Embedding(vocab, width) if vocab else None
        self.blocks = nn.ModuleList()
        self.steps = []
        for block in blocks:
            kind, of = block["kind"], block.get("of", 0)
            if kind == "again" and self.blocks:
                module = self.blocks[of % len(self.blocks)]
            else:
                module = CLASSES.get(kind, LinearBlock)(width, late=late, **block)
                module.inside = (block.get("checkpoint") or "").removesuffix("-inside") if "inside" in (block.get("checkpoint") or "") else None
                _freeze(module, block.get("frozen", "none"))
                if kind == "tied":
                    _tie(module, [m for m in self.blocks if isinstance(m, LinearBlock)], of)
                self.blocks.append(module)
            self.steps.append((len(self.blocks) - 1 if kind != "again" else of % len(self.blocks), block.get("checkpoint")))
        if open_input == "hook" and vocab:  # transformers' enable_input_require_grads()
            self.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
        self.head = nn.Linear(width, vocab or 3, bias=not tied_head)
        if vocab and tied_head:
            self.head.weight = self.embed.weight
        adapted = [m for m in self.modules() if isinstance(m, LoraLinear)]
        if late and adapted:
            self.requires_grad_(False)
            with outside_zero_init():
                for module in adapted:
                    module.adapt()

    def forward(self, x):
        if self.vocab:
            x = self.embed(x)
        if self.open_input is True:
            x = x.requires_grad_(True) if x.is_leaf or not x.requires_grad else x
        for index, mode in self.steps:
            x = _step(self.blocks[index], mode)(x)
        return self.head(x).float().pow(2).mean()

    def batch(self, micro_batch, seq, device, seed):
        generator = torch.Generator().manual_seed(seed)
        if self.vocab:
            return (torch.randint(self.vocab, (micro_batch, seq), generator=generator).to(device),)
        return (torch.randn(micro_batch, seq, self.width, generator=generator).to(device, self.head.weight.dtype),)


def _inside(cls):
    """Checkpointing within a block's forward, inside its hooks, as transformers 5 does."""
    plain = cls.forward

    def forward(self, x):
        mode = getattr(self, "inside", None)
        if mode:
            return checkpoint(lambda y: plain(self, y), x, use_reentrant=mode == "reentrant")
        return plain(self, x)

    cls.forward = forward


_inside(Block)


def _freeze(module, how):
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            continue
        if how == "all" or (how == "weights" and name.endswith("weight")) or (how == "biases" and not name.endswith("weight")):
            parameter.requires_grad_(False)


def _tie(module, earlier, of):
    """Give the block's linear layer the weight of an earlier one."""
    if earlier:
        plain = [m.fc.base_layer if isinstance(m.fc, LoraLinear) else m.fc for m in (module, earlier[of % len(earlier)])]
        plain[0].weight = plain[1].weight


def build(**spec):
    return Model(**spec)


@contextmanager
def outside_zero_init():
    """peft initialises what it adds, which is impossible inside deepspeed.zero.Init: users add adapters after it."""
    partition = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partition:
        partition.shutdown_init_context()
    with capture.outside():
        yield
    if partition:
        partition.restore_init_context()


def qwen2(lora=0, checkpointing=None, tied=False, layers=3, hidden=24, vocab=64, targets="all-linear", also=None):
    """transformers' own Qwen2ForCausalLM, tiny, with peft's LoRA and transformers' gradient checkpointing ("reentrant", "non-reentrant")."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=2 * hidden + 3, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocab, tie_word_embeddings=tied, use_cache=False, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        with outside_zero_init():
            model = get_peft_model(model, LoraConfig(r=lora, target_modules=targets))
    if also:  # train these parameters of the base model too
        for name, parameter in model.named_parameters():
            if also in name:
                parameter.requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        if lora:
            model.enable_input_require_grads()
    model.train()
    model = Loss(model)

    def batch(micro_batch, seq, device, seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(vocab, (micro_batch, seq), generator=generator).to(device),)

    model.batch = batch
    return model


class Loss(nn.Module):
    """The factory protocol around a transformers model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


# --- the real engine, in ranks that a test has started ---


def serve(address, rank, world, device):
    """What each rank does for `test_schedule`: run the jobs that come over a socket, one after another, until it closes.

    A job is {"variant": as for ranks.engine.Engine, "steps": n}; the answer {"steps": [[collective, ...], ...], "resident": [...],
    "order": ds_id of every parameter} or {"error": text}.
    """
    import gc
    import traceback
    from multiprocessing.connection import Client

    connection = Client(address)
    connection.send(rank)
    gc.collect()
    gc.freeze()  # an engine's start calls gc.collect(), which would walk all of torch
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = run(job, rank, world, device)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            answer = {"error": f"{type(error).__name__}: {error} ({where.name}: {where.line})"[:500]}
        gc.collect()
        connection.send(answer)


def run(job, rank, world, device):
    import deepspeed

    from zerolab.ranks import probe
    from zerolab.ranks.engine import Engine
    from zerolab.ranks.wire import Wire

    F.linear = nn.functional.linear = getattr(deepspeed.zero.Init, "linear_bk", F.linear)  # zero.Init's own patch outlives it
    engine = Engine(job["variant"], rank, device)
    wire, residency = Wire(world), probe.Residency(engine)

    def mark(phase, micro):
        wire.phase, wire.micro = phase, micro
        residency.mark(phase, micro)

    answer = {"steps": [], "resident": [], "order": [p.ds_id for p in engine.parameters]}
    wire.attach()
    try:
        for _ in range(job["steps"]):
            wire.begin()
            residency.begin()
            with residency.attached():
                engine.step(mark)
            answer["steps"].append([c.key for c in wire.collectives()])
            answer["resident"].append((residency.peak, residency.kept))
    finally:
        wire.detach()
        engine.destroy()
    return answer


# --- strategies (hypothesis is a test dependency, a rank that builds a model does not need it) ---


def specs(kinds=KINDS, checkpoints=CHECKPOINTS, most_blocks=6):
    """Model specs for `build`."""
    from hypothesis import strategies as st

    block = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(kinds),
            "size": st.integers(1, 9),
            "bias": st.booleans(),
            "lora": st.sampled_from([0, 0, 1, 3]),
            "frozen": st.sampled_from(FROZEN),
            "checkpoint": st.sampled_from(checkpoints),
            "of": st.integers(0, 5),
        }
    )
    return st.fixed_dictionaries(
        {
            "factory": st.just("random_models:build"),
            "width": st.integers(2, 11),
            "blocks": st.lists(block, min_size=1, max_size=most_blocks),
            "vocab": st.sampled_from([0, 0, 5, 16]),
            "open_input": st.sampled_from([False, True, "hook"]),
            "tied_head": st.booleans(),
            "late": st.booleans(),
        }
    )


def configs():
    """zero_optimization sections: thresholds from 0 to beyond any of these models (some hundreds of elements)."""
    from hypothesis import strategies as st

    size = st.one_of(st.sampled_from([0, 1, 10**9]), st.integers(0, 60), st.integers(0, 1500))
    optional = {
        "contiguous_gradients": st.booleans(),
        "reduce_scatter": st.booleans(),
        "stage3_model_persistence_threshold": size,
        "stage3_allgather_sequential": st.booleans(),
        "stage3_use_all_reduce_for_fetch_params": st.booleans(),
        "memory_efficient_linear": st.booleans(),
        "enable_sanity_checks": st.booleans(),
        "overlap_comm": st.booleans(),
    }
    required = {
        "reduce_bucket_size": st.one_of(st.integers(1, 60), st.integers(1, 1500), st.just(10**6)),
        "stage3_prefetch_bucket_size": size,
        "stage3_param_persistence_threshold": size,
        "stage3_max_live_parameters": size,
        "stage3_max_reuse_distance": size,
        "sub_group_size": st.one_of(st.integers(0, 200), st.just(10**9)),
    }
    return st.fixed_dictionaries(required, optional=optional)
