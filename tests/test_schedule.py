"""The schedule predictor against the real engine: every collective of every step, the first ones too.

ZEROLAB_EXAMPLES sets how many random model × config pairs are drawn (60).
"""

import os
import tempfile
import threading
from multiprocessing.connection import Listener

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import random_models
from zerolab import ranks
from zerolab.predict import ModuleTrace, Schedule, Unpredictable, schedule
from zerolab.predict.capture import capture, numbered
from zerolab.trace import Collective, difference

EXAMPLES = int(os.environ.get("ZEROLAB_EXAMPLES", 60))
STEPS = 4


class Ranks:
    """A group of real ranks that runs one job after another; a fresh group from the same leader after an engine has failed."""

    def __init__(self, world):
        self.world = world
        self.folder = tempfile.TemporaryDirectory()
        self.listener = Listener(os.path.join(self.folder.name, "jobs"), "AF_UNIX")
        self.leader = ranks.Leader("cpu")
        self.leader.ready()
        self.connections = []

    def start(self):
        arguments = {"address": self.listener.address}
        job = {"work": "call", "call": "random_models:serve", "arguments": arguments, "threads": 1, "limit": 10**6, "cap": None}
        self.thread = threading.Thread(target=lambda: list(self.leader.run(self.world, job)), daemon=True)
        self.thread.start()
        arrived = [self.listener.accept() for _ in range(self.world)]
        self.connections = [c for _, c in sorted((c.recv(), c) for c in arrived)]

    def run(self, variant, steps=STEPS):
        if not self.connections:
            self.start()
        for connection in self.connections:
            connection.send({"variant": variant, "steps": steps})
        answers = []
        for connection in self.connections:
            assert connection.poll(100), "the ranks are silent: one waits for a collective that another never issues"
            answers.append(connection.recv())
        errors = [a["error"] for a in answers if "error" in a]
        if errors:
            self.stop()  # what it left on the wire would be taken for the next engine's
            return {"error": errors[0]}
        assert all(a["steps"] == answers[0]["steps"] for a in answers), "ranks differ"
        return answers[0]

    def stop(self):
        while self.connections:
            self.connections.pop().close()
        self.thread.join(60)

    def close(self):
        if self.connections:
            self.stop()
        self.leader.kill()
        self.listener.close()
        self.folder.cleanup()


_ranks: dict[int, Ranks] = {}


def real(world) -> Ranks:
    if world not in _ranks:
        _ranks[world] = Ranks(world)
    return _ranks[world]


@pytest.fixture(scope="module", autouse=True)
def _end_ranks():
    yield
    while _ranks:
        _ranks.popitem()[1].close()


def build(model):
    import torch

    model = dict(model)
    function = getattr(random_models, model.pop("factory").partition(":")[2])
    with torch.device("meta"), numbered():
        return function(**model)


def trace_of(model, linear=True) -> ModuleTrace:
    module = build(model)
    return capture(module, module.batch(1, 8, "meta", 0), linear=linear)


def variant(model, zero, accumulation, dtype):
    sections = {"bf16": {"enabled": dtype == "bf16"}, "zero_force_ds_cpu_optimizer": False}
    sections["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}
    return {"model": model, "micro_batch": 1, "seq": 8, "accumulation": accumulation, "zero": zero, "ds_config": sections}


def check(model, zero, world=2, accumulation=1, dtype="bf16"):
    """The prediction equals the engine's own list, element for element, in every step; and what is resident does."""
    found = real(world).run(variant(model, zero, accumulation, dtype))
    try:
        trace = trace_of(model, zero.get("memory_efficient_linear", True))
        predicted = schedule(trace, zero, world, accumulation, STEPS, dtype)
    except (Unpredictable, ValueError) as refusal:
        assert "DeepSpeed fails" in str(refusal) or "needs no gradient" in str(refusal), refusal
        assert "error" in found, f"predicted a failure, but the engine ran: {refusal}"
        return None
    assert "error" not in found, f"the engine failed, which was not predicted: {found['error']}"
    for step, (ours, theirs) in enumerate(zip(predicted.steps, found["steps"], strict=True)):
        text = difference([Collective(*c) for c in theirs], ours.collectives)
        assert not text, f"step {step} (expected: the engine, found: the prediction)\n{text}"
    for step, (ours, (peak, kept)) in enumerate(zip(predicted.steps, found["resident"], strict=True)):
        assert (ours.peak_resident, ours.kept) == (peak, kept), f"step {step}: resident parameters differ"
    ids = sorted(found["order"])
    assert trace.order == [ids.index(i) for i in found["order"]], "parameters are numbered otherwise"
    assert Schedule.from_json(predicted.to_json()) == predicted
    return predicted


def spec(*kinds, **more):
    """A model of these blocks; keywords that a block knows go into each of them."""
    own = {k: more.pop(k) for k in ("lora", "frozen", "checkpoint", "size", "bias", "of") if k in more}
    blocks = [{"kind": kind, **own} for kind in kinds]
    return {"factory": "random_models:build", "width": 7, "blocks": blocks, **more}


TIGHT = {
    "reduce_bucket_size": 50, "stage3_prefetch_bucket_size": 40, "stage3_param_persistence_threshold": 6,
    "stage3_max_live_parameters": 150, "stage3_max_reuse_distance": 120, "sub_group_size": 40,
}  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(
    model=random_models.specs(),
    zero=random_models.configs(),
    accumulation=st.integers(1, 3),
    world=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["bf16", "bf16", "fp32"]),
)
@pytest.mark.timeout(60 + 20 * EXAMPLES)
def test_random_models_and_configs(model, zero, accumulation, world, dtype):
    check(model, zero, world, accumulation, dtype)


@pytest.mark.parametrize("kind", [k for k in random_models.KINDS if k not in ("again", "tied")])
@pytest.mark.parametrize("checkpoint", random_models.CHECKPOINTS)
def test_each_kind_under_each_checkpointing(kind, checkpoint):
    check(spec(kind, "linear", kind, lora=2, frozen="weights", checkpoint=checkpoint, vocab=5, open_input="hook", late=True), TIGHT)


@pytest.mark.parametrize("world", [1, 3])
def test_other_worlds(world):
    """One rank gathers only what goes past the coalesced calls; three pad almost every tensor."""
    check(spec("linear", "own", "outside", "tied"), TIGHT, world, accumulation=2)
    check(spec("linear", "peek"), {**TIGHT, "stage3_allgather_sequential": True}, world)


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_offload(key):
    check(spec("linear", "attention", lora=2), {**TIGHT, key: {"device": "cpu"}}, accumulation=2)


HF = [
    {}, {"tied": True}, {"checkpointing": "non-reentrant"}, {"checkpointing": "reentrant"}, {"lora": 3},
    {"lora": 3, "checkpointing": "non-reentrant"}, {"lora": 3, "checkpointing": "reentrant"},
    {"lora": 2, "targets": ["q_proj", "v_proj"], "checkpointing": "non-reentrant", "tied": True},
]  # fmt: skip


@pytest.mark.parametrize("model", HF, ids=str)
@pytest.mark.parametrize("scale", [0, 1, 10**6])
def test_transformers_and_peft(model, scale):
    """transformers' Qwen2 with peft's adapters and transformers' checkpointing, thresholds below, within and beyond the model."""
    zero = {
        "stage3_prefetch_bucket_size": 1500 * scale, "stage3_param_persistence_threshold": 40 * scale,
        "stage3_max_live_parameters": 6000 * scale, "stage3_max_reuse_distance": 9000 * scale,
        "reduce_bucket_size": 900 * max(scale, 1) if scale < 2 else 10**6, "sub_group_size": 500 * max(scale, 1),
    }  # fmt: skip
    check({"factory": "random_models:qwen2", **model}, zero, accumulation=2 if scale == 1 else 1)


def test_peft_adapters_stay_fp32_and_are_gathered_beside_the_rest():
    predicted = check({"factory": "random_models:qwen2", "lora": 3}, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6})
    widths = {c.bytes // c.elements for c in predicted.steady.select(op="all_gather")}
    assert widths == {2, 4}
    assert predicted.steps[0].count(why="access") == 21  # lora_A.weight.dtype is read before lora_A runs, in each adapted layer


def test_two_gradients_in_one_backward_are_a_failure_foreseen():
    """A weight used twice under reentrant checkpointing: two gradients in one backward."""
    model = spec("linear", "again", checkpoint="reentrant", vocab=5)
    with pytest.raises(Unpredictable, match="comes twice"):
        schedule(trace_of(model), {"reduce_bucket_size": 10**6}, 2)
    assert check(model, {"reduce_bucket_size": 10**6}) is None
    assert check(model, {"reduce_bucket_size": 1}) is not None  # each gradient goes at once


def test_an_output_that_hooks_cannot_see_into():
    """The linear function gathers a frozen weight for its own backward; a trainable one gets its gradient while partitioned."""
    predicted = check(spec("linear", "opaque", frozen="weights", vocab=5), TIGHT | {"stage3_max_reuse_distance": 0})
    assert predicted.steady.count(why="linear") == 1
    model = spec("linear", "opaque", vocab=5)
    with pytest.raises(Unpredictable, match="gets its gradient while it is partitioned"):
        schedule(trace_of(model), TIGHT, 2)
    assert check(model, TIGHT) is None


def test_trainable_parameters_of_two_types_are_a_failure_foreseen():
    """peft's modules_to_save, or any layer trained beside fp32 adapters."""
    model = {"factory": "random_models:qwen2", "lora": 2, "also": "norm"}
    with pytest.raises(Unpredictable, match="several types"):
        schedule(trace_of(model), {}, 2)
    assert check(model, {"reduce_bucket_size": 10**6}) is None
    assert check(model, {"reduce_bucket_size": 10**6}, dtype="fp32") is not None


# --- without ranks ---


@pytest.mark.parametrize(
    "key, value",
    [
        ("stage", 2), ("zero_hpz_partition_size", 8), ("zero_quantized_weights", True), ("stage3_module_granularity_threshold", 10),
        ("offload_param", {"device": "nvme"}), ("offload_optimizer", {"device": "nvme"}), ("no_such_key", 1),
        ("reduce_bucket_size", "auto"), ("leaf_module", {"classes": ["Mixtral"]}), ("zenflow", {"topk_ratio": 0.1}),
    ],
)  # fmt: skip
def test_refuses_what_it_does_not_follow(key, value):
    with pytest.raises(Unpredictable, match=key.replace("offload_param", "nvme").replace("offload_optimizer", "nvme")):
        schedule(trace_of(spec("linear")), {key: value}, 2)


def test_refuses_models_it_does_not_follow():
    import torch
    from torch import nn

    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Returns()

        def forward(self, x):
            return (self.inner() * x).sum()

    with pytest.raises(Unpredictable, match="returns one of its parameters: inner"):
        schedule(capture(Outer(), (torch.ones(3),)), {}, 2)
    leaf = build(spec("linear", "mlp"))
    leaf.blocks[1]._z3_leaf = True
    with pytest.raises(Unpredictable, match="blocks.1 is marked as a leaf"):
        schedule(capture(leaf, leaf.batch(1, 8, "meta", 0)), {}, 2)


def test_refuses_a_model_that_asks_for_values():
    import torch
    from torch import nn

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x).sum() if x.sum() > 0 else x.sum()

    with torch.device("meta"):
        model = Asks()
        with pytest.raises(Unpredictable, match="decides by the values of a tensor"):
            capture(model, (torch.ones(2, 3),))


def test_capture_leaves_the_model_as_it_was():
    import torch
    from torch import nn

    model = build(spec("own", "attention", lora=2))
    linear, ask, parameters = nn.functional.linear, torch.Tensor.__bool__, [m._parameters for m in model.modules()]
    first = capture(model, model.batch(1, 8, "meta", 0))
    assert first == capture(model, lambda: model.batch(1, 8, "meta", 0))
    assert all(a is m._parameters for a, m in zip(parameters, model.modules()))
    assert (linear, ask) == (nn.functional.linear, torch.Tensor.__bool__)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert ModuleTrace.from_json(first.to_json()) == first


def test_summaries():
    model = spec("linear", "linear", "linear")
    predicted = schedule(trace_of(model), {"stage3_param_persistence_threshold": 10, "stage3_prefetch_bucket_size": 60}, 4, accumulation=2)
    step = predicted.steady
    assert step.count() == sum(n for n, _ in step.reasons().values()) == sum(n for n, _, _ in step.table().values())
    assert step.elements(op="all_gather", phase="forward") == step.table()["all_gather", "forward"][1]
    assert step.peak_resident == max(max(series) for series in step.resident)
    gathered = step.elements(op="all_gather", phase="forward") + step.elements(op="all_gather", phase="backward")
    assert predicted.passes == gathered / 2 / predicted.elements
    assert predicted.parameters_of(0, 2) == ["blocks.0.fc.weight", "blocks.0.fc.bias"]
    assert "blocks.0.fc.weight" in predicted.describe(0)
    assert predicted.settled and not schedule(trace_of(model), {}, 4, steps=1).settled


def test_fp16_checks_for_overflow_and_may_skip_a_step():
    trace = trace_of(spec("linear"))
    normal = schedule(trace, {}, 2, dtype="fp16")
    assert normal.steps[0].select(phase="step")[0] == Collective("all_reduce", 1, 1, "step", 0)
    skipped = schedule(trace, {}, 2, dtype="fp16", skipped=[0])
    assert skipped.steps[0].count(phase="step") == 1
    assert skipped.steps[1].collectives[2:] != normal.steps[1].collectives  # what persists must be fetched again


def test_parameter_groups_make_sub_groups_of_their_own():
    trace = trace_of(spec("linear", "linear"))
    weights = [p.name for p in trace.parameters if p.name.endswith("weight")]
    others = [p.name for p in trace.parameters if not p.name.endswith("weight")]
    assert schedule(trace, {}, 2).sub_groups == 1
    assert schedule(trace, {}, 2, param_groups=[weights, others]).sub_groups == 2
