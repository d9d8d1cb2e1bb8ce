"""Which collectives a ZeRO-3 config causes, worked out without running it.

`schedule(trace, config, world)` walks the events of a `ModuleTrace` through DeepSpeed's rules, step by step from the first one,
and lists every collective that the engine issues, in order. Pure Python, linear in the number of tensors.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from zerolab import knobs
from zerolab.trace import PHASES, Collective

from . import moduletrace as mt
from .coordinator import PARTITIONED, Coordinator, Unpredictable
from .reduce import Bucket, padded, sub_groups

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Why a collective was issued.
FETCH, PREFETCH, ACCESS, LINEAR, PERSIST = "fetch", "prefetch", "access", "linear", "persist"
REDUCE, NORM, OVERFLOW, CHECK = "reduce", "norm", "overflow", "check"


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    collectives: in the order in which the engine issues them. why: for each, one of the words above.
    params: for each, the indices of the parameters in it (empty for norms and checks).
    resident: for each micro-step, elements gathered (or being gathered) after each event of forward and backward.
    kept: for each micro-step, elements still gathered when its forward ends, without the persistent ones.
    persistent: elements of persistent parameters.
    """

    collectives: list[Collective]
    why: list[str]
    params: list[list[int]]
    resident: list[list[int]]
    kept: list[int]
    persistent: int

    @property
    def peak_resident(self) -> int:
        """Most elements gathered at one time, persistent ones included."""
        return max(max(series, default=0) for series in self.resident)

    @property
    def kept_to_backward(self) -> int:
        return max(self.kept)

    def select(self, op: str | None = None, phase: str | None = None, why: str | None = None, micro: int | None = None) -> list[Collective]:
        """The collectives that match; None matches any."""
        return [
            c
            for c, w in zip(self.collectives, self.why)
            if op in (None, c.op) and phase in (None, c.phase) and why in (None, w) and micro in (None, c.micro)
        ]

    def count(self, **which) -> int:
        return len(self.select(**which))

    def elements(self, **which) -> int:
        return sum(c.elements for c in self.select(**which))

    def bytes(self, **which) -> int:
        return sum(c.bytes for c in self.select(**which))

    def reasons(self) -> dict[str, tuple[int, int]]:
        """{why: (collectives, elements)}: gathers on demand ("fetch") against prefetched ones, and so on."""
        count: Counter = Counter(self.why)
        size: Counter = Counter()
        for c, w in zip(self.collectives, self.why):
            size[w] += c.elements
        return {w: (count[w], size[w]) for w in count}

    def table(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """{(op, phase): (count, elements, bytes)}, phases in order."""
        found: dict[tuple[str, str], tuple[int, int, int]] = {}
        for c in self.collectives:
            n, e, b = found.get((c.op, c.phase), (0, 0, 0))
            found[c.op, c.phase] = n + 1, e + c.elements, b + c.bytes
        return dict(sorted(found.items(), key=lambda item: (PHASES.index(item[0][1]), item[0][0])))


@dataclass(frozen=True)
class Schedule:
    """What a model and a config cause in the first steps; the last one is the steady state if there are three or more.

    names: of the parameters, for `Step.params`. elements: of the whole model. world, accumulation: as given.
    sub_groups: optimizer sub-groups.
    """

    steps: list[Step]
    names: list[str]
    elements: int
    world: int
    accumulation: int
    sub_groups: int

    @property
    def steady(self) -> Step:
        return self.steps[-1]

    @property
    def passes(self) -> float:
        """Elements gathered in forward and backward of a steady micro-step, over the model's (padding counts)."""
        gathered = sum(self.steady.elements(phase=phase, why=why) for phase in PHASES[:2] for why in (FETCH, PREFETCH, ACCESS, LINEAR))
        return gathered / self.accumulation / self.elements

    def parameters_of(self, step: int, index: int) -> list[str]:
        """Names of the parameters in one collective."""
        return [self.names[p] for p in self.steps[step].params[index]]

    def describe(self, step: int = -1, first: int = 10) -> str:
        """The first collectives of a step, one a line, for a reader."""
        lines = []
        chosen = self.steps[step]
        for c, why, params in list(zip(chosen.collectives, chosen.why, chosen.params))[:first]:
            names = ", ".join(self.names[p] for p in params[:3]) + (f" and {len(params) - 3} more" if len(params) > 3 else "")
            lines.append(f"{c.phase:8} {c.op:14} {c.elements:>14,} elements  {why:8} {names}")
        return "\n".join(lines)

    def to_json(self) -> str:
        steps = [
            {**vars(s), "collectives": [list(c.key) for c in s.collectives]} for s in self.steps
        ]
        return json.dumps({**vars(self), "steps": steps}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        data = json.loads(text)
        data["steps"] = [Step(**{**s, "collectives": [Collective(*c) for c in s["collectives"]]}) for s in data["steps"]]
        return cls(**data)


def schedule(
    trace: mt.ModuleTrace,
    config: Mapping | None = None,
    world: int = 4,
    accumulation: int = 1,
    steps: int = 4,
    dtype: str = "bf16",
    param_groups: Iterable[Iterable[str]] | None = None,
    skipped: Iterable[int] = (),
) -> Schedule:
    """Every collective of the first `steps` optimizer steps.

    config: a `zero_optimization` section; missing keys take the installed DeepSpeed's stage-3 defaults.
    world: ranks. accumulation: micro-steps in an optimizer step. dtype: "bf16", "fp16" or "fp32" (one type for the whole model).
    param_groups: names of the trainable parameters in each of the optimizer's groups (default: one group, module order).
    skipped: steps that fp16's loss scaling throws away (an overflow cannot be foreseen; by default there is none).

    Raises Unpredictable for what is not followed: the message says what and why.
    """
    return _Engine(trace, config, world, accumulation, dtype, param_groups, frozenset(skipped)).run(steps)


class _Engine:
    """The steps of a DeepSpeedEngine with ZeRO-3, as far as collectives go."""

    def __init__(self, trace, config, world, accumulation, dtype, param_groups, skipped):
        self.trace, self.world, self.accumulation, self.dtype, self.skipped = trace, world, accumulation, dtype, skipped
        self.z = z = resolve(config, trace, world, dtype)
        self.item = BYTES[dtype]
        numel = [p.elements for p in trace.parameters]
        self.persist = persistent(trace, z["stage3_param_persistence_threshold"], z["stage3_model_persistence_threshold"])
        self.persistent_elements = sum(numel[p] for p in self.persist)
        sequential = z["stage3_allgather_sequential"]
        self.coordinator = Coordinator(
            trace,
            self.persist,
            prefetch=1 if sequential else int(z["stage3_prefetch_bucket_size"]),
            max_live=int(z["stage3_max_live_parameters"]),
            max_reuse=int(z["stage3_max_reuse_distance"]),
            gather=self.gather,
        )
        self.bucket = Bucket(numel, int(z["reduce_bucket_size"]), self.reduce)
        self.numel, self.sequential = numel, sequential
        groups = optimizer_groups(trace, param_groups)
        self.sub_groups = sum(
            len(sub_groups([padded(numel[p], world) // world for p in group], int(z["sub_group_size"]))) for group in groups
        )
        self.memo: dict[tuple, tuple] = {}

    def run(self, steps: int) -> Schedule:
        done = [self.step(i) for i in range(steps)]
        names = [p.name for p in self.trace.parameters]
        return Schedule(done, names, self.trace.elements, self.world, self.accumulation, self.sub_groups)

    def emit(self, op: str, elements: int, size: int, why: str, params: list[int] = ()) -> None:
        self.out.append((Collective(op, elements, elements * size, self.phase, self.micro), why, list(params)))

    # --- what the coordinator and the bucket ask for ---

    def gather(self, params: list[int], why: str) -> None:
        if self.world == 1 and why in (FETCH, PREFETCH):
            return  # all_gather_coalesced hands over the only shard
        if self.sequential or len(params) == 1:
            for p in params:
                self.emit("all_gather", padded(self.numel[p], self.world), self.item, why, [p])
            return
        elements = sum(padded(self.numel[p], self.world) for p in params)
        op = "all_reduce" if self.z["stage3_use_all_reduce_for_fetch_params"] else "all_gather"
        self.emit(op, elements, self.item, why, params)

    def reduce(self, params: list[int]) -> None:
        if self.z["enable_sanity_checks"]:
            self.compare(len(params))
        plain = sum(self.numel[p] for p in params)
        if self.z["contiguous_gradients"] and plain <= self.bucket.size and not self.z["reduce_scatter"]:
            self.emit("all_reduce", plain, self.item, REDUCE, params)
        else:
            self.emit("reduce_scatter", sum(padded(self.numel[p], self.world) for p in params), self.item, REDUCE, sorted(params))

    def compare(self, length: int) -> None:
        """assert_ints_same_as_other_ranks: the length of a list, then the list, both as int64."""
        self.emit("broadcast", 1, 8, CHECK)
        self.emit("broadcast", length, 8, CHECK)

    # --- an optimizer step ---

    def step(self, index: int) -> Step:
        out, series, kept = [], [], []
        for micro in range(self.accumulation):
            collectives, resident, rest = self.micro_step(micro)
            out += collectives
            series.append(resident)
            kept.append(rest)
        self.out, self.phase = [], "step"
        self.micro = self.accumulation - 1
        self.optimizer_step(index in self.skipped)
        out += self.out
        return Step([c for c, _, _ in out], [w for _, w, _ in out], [p for _, _, p in out], series, kept, self.persistent_elements)

    def micro_step(self, micro: int) -> tuple[list, list[int], int]:
        """Forward and backward. One that begins like an earlier one runs like it, and is copied."""
        co = self.coordinator
        key = co.state() if co.complete and co.release_cache else None
        if key in self.memo:
            collectives, resident, kept, end = self.memo[key]
            co.restore(end)
            return [(c._replace(micro=micro), w, p) for c, w, p in collectives], resident, kept
        self.out, self.micro, self.phase = [], micro, "forward"
        resident: list[int] = []
        for length in co.reset_step():
            self.compare(length)
        self.play(self.trace.forward, resident)
        kept = co.resident - sum(self.numel[p] for p in self.persist if co.status[p] != PARTITIONED)
        self.phase = "backward"
        self.play(self.trace.backward, resident)
        self.bucket.flush()
        co.release_backward_leftovers()
        if key is not None and not co.inflight:
            self.memo[key] = self.out, resident, kept, co.state()
        return self.out, resident, kept

    def play(self, events: list[list], resident: list[int]) -> None:
        co = self.coordinator
        for kind, index, *rest in events:
            if kind == mt.PRE_FORWARD:
                co.fetch_sub_module(index, forward=True)
            elif kind == mt.POST_FORWARD:
                co.release_sub_module(index, forward=True)
            elif kind == mt.PRE_BACKWARD:
                co.fetch_sub_module(index, forward=False)
            elif kind == mt.POST_BACKWARD:
                co.release_sub_module(index, forward=False)
            elif kind == mt.RECOMPUTE:
                co.fetch_sub_module(index, forward=True, recompute=True)
            elif kind == mt.GRADIENT:
                self.bucket.add(index)
            elif kind == mt.LINEAR:
                if co.status[index] == PARTITIONED:  # gathered for this one product, then freed
                    self.gather([index], LINEAR)
            else:
                co.access(index, rest[0])
            resident.append(co.resident)

    def optimizer_step(self, skipped: bool) -> None:
        self.coordinator.release_and_reset_all()
        if self.dtype == "fp16":
            self.emit("all_reduce", 1, 1, OVERFLOW)
            if skipped:
                return
        for _ in range(self.sub_groups):
            self.emit("all_reduce", 1, 4 if self.z["offload_optimizer"] else 8, NORM)
        for p in self.persist:
            self.coordinator.gather_now(p, PERSIST)


def persistent(trace: mt.ModuleTrace, threshold: int, limit: int) -> list[int]:
    """Parameters that stay gathered between steps, in the order in which they are gathered again (mark_persistent_parameters)."""
    chosen, total = [], 0
    for p in trace.order:
        elements = trace.parameters[p].elements
        if elements + total <= limit and elements <= threshold:
            chosen.append(p)
            total += elements
    return chosen


def optimizer_groups(trace: mt.ModuleTrace, param_groups: Iterable[Iterable[str]] | None) -> list[list[int]]:
    if param_groups is None:
        groups = [[p for p in trace.order if trace.parameters[p].trainable]]
    else:
        index = {p.name: i for i, p in enumerate(trace.parameters)}
        groups = [[index[name] for name in group] for group in param_groups]
    return [g for g in groups if g]


# Keys that change the schedule in ways that are not followed: {key: (accepted values, why not)}.
REFUSED = {
    "stage": ((3,), "only stage 3 partitions parameters"),
    "stage3_module_granularity_threshold": ((0,), "it makes leaf modules, fetched as one piece by several threads"),
    "zero_hpz_partition_size": ((0, 1), "a second partition inside the node changes each gather's group and size"),
    "zero_quantized_weights": ((False,), "gathers carry int8 and their scales"),
    "zero_quantized_nontrainable_weights": ((False,), "gathers carry int8 and their scales"),
    "zero_quantized_gradients": ((False,), "gradients are reduced by all-to-all"),
    "zenflow": ((None,), "ZenFlow updates selected gradient columns by its own collectives"),
    "mics_shard_size": ((-1,), "MiCS gathers within sub-groups of ranks"),
}


def resolve(config: Mapping | None, trace: mt.ModuleTrace, world: int, dtype: str) -> dict:
    """The full `zero_optimization` section, every key that counts here present. Raises Unpredictable."""
    given = dict(config or {})
    z = knobs.stage3_defaults()
    unknown = [k for k in given if k not in z and k not in OTHER_KEYS]
    if unknown:
        raise Unpredictable(f"unknown zero_optimization key {unknown[0]!r}: DeepSpeed {knobs.deepspeed_version()} may refuse it")
    z.update(given)
    if any(v == "auto" for v in z.values()):
        raise Unpredictable("'auto' stands for a value that only the launcher knows: resolve it first")
    for key, (accepted, reason) in REFUSED.items():
        if z.get(key, accepted[0]) not in accepted:
            raise Unpredictable(f"zero_optimization.{key} = {z[key]!r} is not followed: {reason}")
    for key in ("offload_param", "offload_optimizer"):
        section = z.get(key) or {}
        device = section.get("device", "none") if isinstance(section, Mapping) else section
        if device == "nvme":
            raise Unpredictable(f"{key} to nvme is not followed: what is prefetched depends on free swap buffers")
        if section and section.get("super_offload"):
            raise Unpredictable("super_offload is not followed: it buckets gradients by its own rules")
        z[key] = None if device in ("none", None) else section
    if trace.refused:
        raise Unpredictable(f"this model is not followed: {trace.refused[0]}")
    classes = leaf_classes(z.get("leaf_module"))
    leaf = next((m for m in trace.modules if m.cls in classes), None)
    if leaf:
        raise Unpredictable(f"{leaf.name} ({leaf.cls}) is a leaf module, fetched whole: which experts run is not known")
    if dtype not in BYTES:
        raise Unpredictable(f"dtype must be one of {sorted(BYTES)}, not {dtype!r}")
    if world < 1:
        raise ValueError("world must be at least 1")
    if bool(z.get("memory_efficient_linear", True)) != trace.linear:
        raise ValueError(f"the trace was captured with linear={trace.linear}: memory_efficient_linear is {not trace.linear} in the config")
    return z


# Accepted, and without influence on stage 3's collectives.
OTHER_KEYS = frozenset(
    "offload_param offload_optimizer leaf_module zenflow cpu_offload cpu_offload_params cpu_offload_use_pin_memory "
    "stage3_gather_fp16_weights_on_model_save".split()
)


def leaf_classes(section: Mapping | None) -> frozenset[str]:
    """Classes that DeepSpeed treats as leaf modules: the config's, or its own list."""
    if section is not None:
        return frozenset(section.get("classes", ()))
    tree = ast.parse(knobs.source("runtime/zero/leaf_module_config.py"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "DEFAULT_LEAF_MODULE_CLASSES":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
