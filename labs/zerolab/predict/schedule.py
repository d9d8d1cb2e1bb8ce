"""Which collectives a ZeRO-3 config causes, worked out without running it.

`schedule(trace, config, world)` walks the events of a `ModuleTrace` through DeepSpeed's rules, step by step from the first one,
and lists every collective that the engine issues, in order. Pure Python, linear in the number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zerolab.trace import Collective

from . import moduletrace as mt
from .config import BYTES, check, resolve
from .coordinator import PARTITIONED, Coordinator, Unpredictable
from .gathered import Gathered, padded
from .reduce import Bucket, sub_groups
from .steps import ACCESS, CHECK, FETCH, LINEAR, NORM, NOTHING, OVERFLOW, PERSIST, PREFETCH, REDUCE, Schedule, Step
from .time import Lanes, Machine


def schedule(
    trace: mt.ModuleTrace,
    config: Mapping | None = None,
    world: int = 4,
    accumulation: int = 1,
    steps: int = 4,
    dtype: str = "bf16",
    communication: str | None = None,
    param_groups: Iterable[Iterable[str]] | None = None,
    skipped: Iterable[int] = (),
    machine: Machine | None = None,
    keep: bool = False,
) -> Schedule:
    """Every collective of the first `steps` optimizer steps.

    config: a `zero_optimization` section; missing keys take the installed DeepSpeed's stage-3 defaults.
    world: ranks. accumulation: micro-steps in an optimizer step. dtype: "bf16", "fp16" or "fp32".
    communication: ds_config's `communication_data_type` (default: dtype).
    param_groups: names of the trainable parameters in each of the optimizer's groups (default: one group, module order).
    skipped: steps that fp16's loss scaling throws away (an overflow cannot be foreseen; by default there is none).
    machine: whose seconds to count; the trace needs spans. keep: keep every busy interval of its lanes.

    Raises Unpredictable for what is not followed: the message says what and why.
    """
    z = resolve(config)
    check(trace, z, world, (dtype, communication or dtype))
    lanes = None
    if machine:
        offload = z["offload_param"] or z["offload_optimizer"] or {}
        # overlap_comm is None in a config that leaves it out; stage 3 turns it on (runtime/zero/config.py, overlap_comm_valid).
        lanes = Lanes(machine, world, overlap=z["overlap_comm"] is not False, pinned=bool(offload.get("pin_memory")), keep=keep)
    engine = _Engine(trace, z, world, accumulation, dtype, communication or dtype, param_groups, frozenset(skipped), lanes)
    return engine.run(steps)


class _Engine:
    """The steps of a DeepSpeedEngine with ZeRO-3, as far as collectives go."""

    def __init__(self, trace, z, world, accumulation, dtype, communication, param_groups, skipped, lanes):
        self.lanes = lanes
        self.trace, self.z, self.world, self.accumulation, self.skipped = trace, z, world, accumulation, skipped
        self.dtype, self.communication = dtype, communication
        self.item = [BYTES[p.dtype or dtype] for p in trace.parameters]
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
            gathered=Gathered(numel, self.item, world, bool(sequential), bool(z["offload_param"])),
            waits=lanes.wait if lanes else lambda params: None,
        )
        self.bucket = Bucket(numel, int(z["reduce_bucket_size"]), bool(z["contiguous_gradients"]), self.reduce)
        self.numel, self.sequential = numel, sequential
        groups = optimizer_groups(trace, param_groups)
        self.trainable_dtype = one_dtype([trace.parameters[p].dtype or dtype for g in groups for p in g], z)
        self.tiles = [
            tile for group in groups for tile in sub_groups([padded(numel[p], world) // world for p in group], int(z["sub_group_size"]))
        ]
        self.memo: dict[tuple, tuple] = {}
        self.watched = True

    def run(self, steps: int) -> Schedule:
        done = []
        for index in range(steps):
            self.watched = index == steps - 1  # memory and time of the last step are asked for, and cost
            done.append(self.step(index))
        names = [p.name for p in self.trace.parameters]
        return Schedule(done, names, self.trace.elements, self.world, self.accumulation, self.tiles)

    def emit(self, op: str, elements: int, size: int, why: str, params: list[int] = ()) -> None:
        self.out.append((Collective(op, elements, elements * size, self.phase, self.micro), why, list(params)))
        if not (self.lanes and self.watched):
            return
        if why == REDUCE:
            self.lanes.reduce(len(params), elements * size)
        elif params:
            shard = elements * size / self.world if self.z["offload_param"] else 0
            self.lanes.gather(params, elements * size, shard, wait=why in (ACCESS, LINEAR, PERSIST))

    # --- what the coordinator and the bucket ask for ---

    def gather(self, params: list[int], why: str) -> None:
        if self.world == 1 and why in (FETCH, PREFETCH, NOTHING):  # the coalesced paths hand over the only shard
            if self.lanes and self.watched and self.z["offload_param"]:
                self.lanes.fetch_own(params, sum(self.numel[p] * self.item[p] for p in params))
            return
        if self.sequential or len(params) == 1:
            for p in params:
                self.emit("all_gather", padded(self.numel[p], self.world), self.item[p], why, [p])
            return
        by_dtype: dict[str, list[int]] = {}
        for p in params:
            by_dtype.setdefault(self.trace.parameters[p].dtype or self.dtype, []).append(p)
        op = "all_reduce" if self.z["stage3_use_all_reduce_for_fetch_params"] else "all_gather"
        if op == "all_reduce" and len(by_dtype) > 1:
            raise Unpredictable(
                "DeepSpeed fails: stage3_use_all_reduce_for_fetch_params with parameters of several types in one gather"
            )
        for dtype in sorted(by_dtype):
            group = by_dtype[dtype]
            self.emit(op, sum(padded(self.numel[p], self.world) for p in group), BYTES[dtype], why, group)

    def reduce(self, params: list[int]) -> int:
        """Emits one reduction; returns the elements of the flat copy that it makes of its gradients."""
        if self.z["enable_sanity_checks"]:
            self.compare(len(params))
        size, elements = BYTES[self.communication], sum(self.numel[p] for p in params)
        if self.z["contiguous_gradients"] and elements <= self.bucket.size and not self.z["reduce_scatter"]:
            self.emit("all_reduce", elements, size, REDUCE, params)
            return 0
        flat = sum(padded(self.numel[p], self.world) for p in params)
        self.emit("reduce_scatter", flat, size, REDUCE, sorted(params))
        return 0 if len(params) == 1 and flat == elements else flat

    def compare(self, length: int) -> None:
        """assert_ints_same_as_other_ranks: the length of a list, then the list, both as int64."""
        self.emit("broadcast", 1, 8, CHECK)
        self.emit("broadcast", length, 8, CHECK)

    # --- an optimizer step ---

    def step(self, index: int) -> Step:
        out, series, kept = [], [], []
        self.peaks = {}
        if self.lanes:
            self.lanes.begin()
        for micro in range(self.accumulation):
            collectives, resident, rest = self.micro_step(micro)
            out += collectives
            series.append(resident)
            kept.append(rest)
        self.out = []
        self.enter("step")
        self.micro = self.accumulation - 1
        self.optimizer_step(index in self.skipped)
        out += self.out
        self.enter("")
        parts = [c for c, _, _ in out], [w for _, w, _ in out], [p for _, _, p in out]
        lanes = (self.lanes.seconds, self.lanes.busy, self.lanes.intervals) if self.lanes and self.watched else ({}, {}, {})
        return Step(*parts, series, kept, self.persistent_elements, self.peaks, *lanes)

    def enter(self, phase: str) -> None:
        self.phase = phase
        if self.lanes:
            self.lanes.phase(phase)

    def micro_step(self, micro: int) -> tuple[list, list[int], int]:
        """Forward and backward. One that begins like an earlier one runs like it, and is copied."""
        co = self.coordinator
        key = (co.state(), self.watched) if co.complete and co.release_cache else None
        if key in self.memo:
            collectives, resident, kept, peaks, happened, end = self.memo[key]
            co.restore(end)
            if self.lanes:
                self.lanes.repeat(happened)
            self.peaks = {phase: max(peaks[phase], self.peaks.get(phase, [0]), key=sum) for phase in peaks}
            return [(c._replace(micro=micro), w, p) for c, w, p in collectives], resident, kept
        begin = self.lanes.mark() if self.lanes else None
        self.out, self.micro = [], micro
        self.enter("forward")
        resident: list[int] = []
        for length in co.reset_step():
            self.compare(length)
        self.play(self.trace.forward, self.trace.forward_spans, resident)
        kept = co.resident - sum(self.numel[p] for p in self.persist if co.status[p] != PARTITIONED)
        self.enter("backward")
        self.play(self.trace.backward, self.trace.backward_spans, resident)
        self.bucket.flush()
        if self.watched:
            self.note(0, 0)
        co.release_backward_leftovers()
        self.enter("")
        if key is not None and not co.inflight:
            happened = self.lanes.since_mark(begin) if self.lanes else None
            self.memo[key] = self.out, resident, kept, dict(self.peaks), happened, co.state()
        return self.out, resident, kept

    def note(self, live: int, peak: int) -> None:
        """Keep the fullest moment of this phase. live: bytes of activations at a hook; peak: most of them until the next."""
        gathered, bucket, item = self.coordinator.gathered, self.bucket, BYTES[self.dtype]
        at_hook = gathered.high, live, bucket.high * item
        gathered.high, bucket.high = gathered.now, bucket.loose
        after = gathered.now, peak, bucket.loose * item
        fullest = max(sum(at_hook), sum(after))
        if fullest > self.fullest:
            self.fullest = fullest
            self.peaks[self.phase] = list(max(at_hook, after, key=sum))

    def play(self, events: list[list], spans: list[list[int]], resident: list[int]) -> None:
        co, lanes = self.coordinator, self.lanes if self.watched else None
        spans = spans or [[0] * 5] * (len(events) + 1)
        self.fullest = sum(self.peaks.get(self.phase, ()))
        co.gathered.high, self.bucket.high = co.gathered.now, self.bucket.loose
        if self.watched:
            self.note(*spans[0][:2])
        if lanes:
            lanes.compute(*spans[0][2:])
        for (kind, index, *rest), (live, peak, *work) in zip(events, spans[1:]):
            if lanes and kind not in (mt.GRADIENT, mt.LINEAR, mt.ACCESS):
                lanes.hook()
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
                if co.status[index] == PARTITIONED:
                    raise Unpredictable(
                        f"DeepSpeed fails: {self.trace.parameters[index].name} gets its gradient while it is partitioned, since no "
                        "pre-backward hook gathered it (its module's output is of a type that the hooks cannot see into)"
                    )
                self.bucket.add(index)
            elif kind == mt.LINEAR:
                if co.status[index] == PARTITIONED:  # gathered for this one product, then freed
                    self.gather([index], LINEAR)
                    co.gathered.once(index)
            else:
                co.access(index, rest[0])
            resident.append(co.resident)
            if self.watched:
                self.note(live, peak)
            if lanes:
                lanes.compute(*work)

    def optimizer_step(self, skipped: bool) -> None:
        self.coordinator.release_and_reset_all()
        if self.trainable_dtype == "fp16":
            self.emit("all_reduce", 1, 1, OVERFLOW)
            if skipped:
                return
        for _ in self.tiles:
            self.emit("all_reduce", 1, 4 if self.z["offload_optimizer"] else 8, NORM)
        self.update()
        for p in self.persist:
            self.coordinator.gather_now(p, PERSIST if self.world > 1 or self.sequential or len(self.persist) == 1 else NOTHING)

    def update(self) -> None:
        """Time of the optimizer itself."""
        if not self.lanes:
            return
        here, away = on_host(self.z["offload_optimizer"], self.tiles)
        size, moved = BYTES[self.trainable_dtype], sum(away)
        # Gradients go to the host in every micro-step and once more in 32 bit; they come back to be added to.
        self.lanes.optimizer(here, moved, moved * (size * (2 * self.accumulation - 1) + 4))


def on_host(offload: Mapping | None, tiles: list[int]) -> tuple[list[int], list[int]]:
    """Sub-groups on the device and on the host: an `offload_optimizer` section's `ratio` leaves the first ones on the device."""
    here = int((1 - offload.get("ratio", 1.0)) * len(tiles)) if offload else len(tiles)
    return tiles[:here], tiles[here:]


def persistent(trace: mt.ModuleTrace, threshold: int, limit: int) -> list[int]:
    """Parameters that stay gathered between steps, in the order in which they are gathered again (mark_persistent_parameters)."""
    chosen, total = [], 0
    for p in trace.order:
        elements = trace.parameters[p].elements
        if elements + total <= limit and elements <= threshold:
            chosen.append(p)
            total += elements
    return chosen


def one_dtype(dtypes: list[str], z: Mapping) -> str:
    """The type of all trainable parameters; the optimizer's flat buffer has only one (defragment in runtime/zero/utils.py)."""
    found = sorted(set(dtypes))
    if len(found) > 1:
        what = f"trainable parameters of several types ({', '.join(found)})"
        if z["offload_param"]:
            raise Unpredictable(
                f"{what} with offload_param are not followed: DeepSpeed moves all shards into a buffer of one type"
            )
        raise Unpredictable(f"DeepSpeed fails: {what} do not go into its one flat buffer (AssertionError in defragment)")
    if not found:
        raise Unpredictable("nothing is trainable: ZeRO-3 makes no optimizer")
    return found[0]


def optimizer_groups(trace: mt.ModuleTrace, param_groups: Iterable[Iterable[str]] | None) -> list[list[int]]:
    if param_groups is None:
        groups = [[p for p in trace.order if trace.parameters[p].trainable]]
    else:
        index = {p.name: i for i, p in enumerate(trace.parameters)}
        groups = [[index[name] for name in group] for group in param_groups]
    return [g for g in groups if g]
