"""What one rank holds and does in a step: resident parameters, bytes by purpose, memory peaks, a timeline, host copies.

All of this runs in the watch pass, never while a clock runs.
"""

from __future__ import annotations

import contextlib
import gc

GPU = "cuda"


def size(tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor is not None else 0


class Residency:
    """Elements of gathered parameters over one step, read at the coordinator after each fetch and each release.

    series: [phase, elements] whenever the value changes; peak: the largest; kept: non-persistent elements that survive from the
    end of a forward into its backward, for each micro-step.
    """

    def __init__(self, engine):
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self.gone = ZeroParamStatus.NOT_AVAILABLE
        self.parameters = engine.parameters
        self.coordinator = engine.coordinator
        self.phase = "forward"
        self.begin()

    def begin(self):
        self.series, self.peak, self.kept = [], 0, []

    def now(self, persistent=True) -> int:
        return sum(p.ds_numel for p in self.parameters if p.ds_status != self.gone and (persistent or not p.ds_persist))

    def sample(self):
        resident = self.now()
        self.peak = max(self.peak, resident)
        if not self.series or self.series[-1] != [self.phase, resident]:
            self.series.append([self.phase, resident])

    def mark(self, phase, micro):
        if phase == "backward":
            self.kept.append(self.now(persistent=False))
        self.phase = phase
        self.sample()

    @contextlib.contextmanager
    def attached(self):
        fetch, release = self.coordinator.fetch_sub_module, self.coordinator.release_sub_module

        def fetch_and_sample(*args, **kwargs):
            result = fetch(*args, **kwargs)
            self.sample()
            return result

        def release_and_sample(*args, **kwargs):
            result = release(*args, **kwargs)
            self.sample()
            return result

        self.coordinator.fetch_sub_module, self.coordinator.release_sub_module = fetch_and_sample, release_and_sample
        try:
            yield self
        finally:
            del self.coordinator.fetch_sub_module, self.coordinator.release_sub_module

    def summary(self) -> dict:
        return {"peak": self.peak, "kept": self.kept, "series": self.series}


def holdings(engine) -> dict:
    """Bytes that this rank keeps between steps, by purpose, and on which device each lives.

    {part: {"bytes": int, "device": str}} with the parts parameters, gradients, gradient_buffer (the reduce bucket), master,
    master_gradients, optimizer, persistent. Stage 3 only; `alive()` serves every stage.
    """
    optimizer, parts = engine.optimizer, {}

    def add(part, tensors):
        tensors = [t for t in tensors if t is not None and t.numel()]
        devices = {t.device.type for t in tensors}
        parts[part] = {"bytes": sum(size(t) for t in tensors), "device": "+".join(sorted(devices)) or "-"}

    add("parameters", [p.ds_tensor for p in engine.parameters])
    add("persistent", [p.data for p in engine.parameters if p.ds_persist and p.numel()])
    add("gradients", [getattr(optimizer, "grad_partitions_flat_buffer", None)])
    add("gradient_buffer", [b.buffer for b in optimizer.ipg_buckets.values()])
    masters = optimizer.fp32_partitioned_groups_flat
    add("master", [t.data for t in masters])
    add("master_gradients", [t.grad for t in masters])
    states = optimizer.optimizer.state.values()
    add("optimizer", [v for s in states for v in s.values() if hasattr(v, "numel") and v.numel() > 1])
    return parts


def alive(device: str) -> dict[str, int]:
    """Bytes of every live tensor's storage on a device type, by dtype, each storage once. Works for every stage."""
    import torch

    gc.collect()
    found = {}

    def add(tensor):
        with contextlib.suppress(Exception):
            if tensor is not None and tensor.device.type == device:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = (storage.nbytes(), str(tensor.dtype).removeprefix("torch."))

    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            add(thing)
            with contextlib.suppress(Exception):
                add(thing.grad if thing.is_leaf else None)
    totals: dict[str, int] = {}
    for nbytes, dtype in found.values():
        totals[dtype] = totals.get(dtype, 0) + nbytes
    return totals


class HostCopies:
    """Bytes of parameter shards that a gather asks to be on the device: real copies when they live on the host.

    On a CPU tier the copy is no copy, but DeepSpeed's request (`ds_tensor.to(device)`) is the same, so the count is exact.
    """

    def __init__(self, engine):
        self.shards = {id(p.ds_tensor) for p in engine.parameters}
        self.phase = "forward"
        self.begin()

    def begin(self):
        self.bytes = {"forward": 0, "backward": 0, "step": 0}

    @contextlib.contextmanager
    def attached(self):
        import torch

        original, shards, counter = torch.Tensor.to, self.shards, self

        def to(tensor, *args, **kwargs):
            if id(tensor) in shards and args and not isinstance(args[0], torch.dtype):
                counter.bytes[counter.phase] += size(tensor)
            return original(tensor, *args, **kwargs)

        torch.Tensor.to = to
        try:
            yield self
        finally:
            torch.Tensor.to = original


@contextlib.contextmanager
def pin_requests(found: dict):
    """Count what DeepSpeed asks the accelerator to page-lock while the block runs: `found["bytes"]`, `found["calls"]`.

    On a CPU tier nothing is locked, but the requests are the same.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    original = accelerator.pin_memory
    found.update(bytes=0, calls=0)

    def pin_memory(tensor, *args, **kwargs):
        found["bytes"] += size(tensor)
        found["calls"] += 1
        return original(tensor, *args, **kwargs)

    accelerator.pin_memory = pin_memory
    try:
        yield found
    finally:
        del accelerator.pin_memory


@contextlib.contextmanager
def profiled(device: str, result: dict, memory: bool):
    """Run the block under torch.profiler; `result["events"]` holds the raw kineto events afterwards."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == GPU else [])
    with profile(activities=activities, profile_memory=memory) as session:
        yield
    result["events"] = list(session.profiler.kineto_results.events())


def peak_bytes(events) -> int:
    """Largest net allocation of the CPU allocator during a profiled region, in bytes above its start."""
    import torch

    cpu = torch.autograd.DeviceType.CPU
    memory = sorted(
        (e for e in events if e.name() == "[memory]" and e.device_type() == cpu), key=lambda event: event.start_ns()
    )
    now = peak = 0
    for event in memory:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


# Ops that only move or make views are no computation; neither is what waits.
_NOT_COMPUTE = ("c10d::", "gloo:", "nccl:", "aten::empty", "aten::view", "aten::as_strided", "aten::to", "aten::_to_copy",
                "aten::copy_", "aten::detach", "aten::narrow", "aten::slice", "aten::alias", "aten::cat", "aten::zeros",
                "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::t", "aten::transpose", "aten::select")  # fmt: skip


def timeline(events, device: str) -> dict[str, list[list[float]]]:
    """Merged busy intervals [start, end] in seconds of three lanes: compute, link, host copies.

    On a GPU the lanes are kernels (NCCL's are the link) and copies between host and device; on a CPU they are aten operators
    and gloo's own spans.
    """
    import torch

    cuda, lanes, zero = torch.autograd.DeviceType.CUDA, {"compute": [], "link": [], "copy": []}, None
    for event in events:
        name = event.name()
        if name == "[memory]" or event.duration_ns() <= 0:
            continue
        zero = event.start_ns() if zero is None else min(zero, event.start_ns())
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if device == GPU:
            if event.device_type() != cuda or name.startswith(("nccl:", "Memset", "gpu_user")):
                continue
            if "nccl" in name.lower():
                lanes["link"].append(span)
            elif name.startswith("Memcpy HtoD") or name.startswith("Memcpy DtoH"):
                lanes["copy"].append(span)
            elif not name.startswith("Memcpy"):
                lanes["compute"].append(span)
        elif name.startswith("gloo:"):
            lanes["link"].append(span)
        elif name.startswith("aten::") and not name.startswith(_NOT_COMPUTE):
            lanes["compute"].append(span)
    return {lane: _merge(spans, zero or 0) for lane, spans in lanes.items()}


def _merge(spans, zero, gap=20_000, limit=1500):
    """Join spans closer than `gap` ns; widen the gap until at most `limit` remain."""
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    if len(merged) > limit:
        return _merge(spans, zero, gap * 2, limit)
    return [[round((s - zero) / 1e9, 6), round((e - zero) / 1e9, 6)] for s, e in merged]


class OptimizerTraffic:
    """Bytes that an offloaded optimizer moves between device and host in one step, by direction and phase.

    to_host: 16-bit gradients into the host's buffer in every micro-step, 32-bit ones at the last. to_device: those 16-bit
    gradients back (to add to them, or to take their norm), and the updated 16-bit weights. On a CPU tier nothing moves, but
    DeepSpeed's requests are the same, so the counts are exact.
    Source: deepspeed/runtime/zero/stage3.py, partition_grads, _offload_grad_partition_at_boundary,
    _reassign_or_swap_out_partitioned_parameters.
    """

    def __init__(self, engine):
        optimizer = engine.optimizer
        self.offloaded = bool(getattr(optimizer, "offload_optimizer", False))
        self.phase = "forward"
        self.begin()
        if self.offloaded:
            masters = optimizer.fp32_partitioned_groups_flat
            hosted = [m for i, m in enumerate(masters) if optimizer.subgroup_to_device[i] == "cpu"]
            self.gradients = {self.place(optimizer.grad_partitions_flat_buffer)}
            self.master_gradients = {self.place(m.grad) for m in hosted if m.grad is not None}
            self.masters = {self.place(m.data) for m in hosted}

    @staticmethod
    def place(tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def begin(self):
        self.bytes = {way: {"forward": 0, "backward": 0, "step": 0} for way in ("to_host", "to_device")}

    @contextlib.contextmanager
    def attached(self):
        if not self.offloaded:
            yield self
            return
        import torch
        from deepspeed.accelerator import get_accelerator

        accelerator, counter = get_accelerator(), self
        copy_, to, on_accelerator = torch.Tensor.copy_, torch.Tensor.to, accelerator.on_accelerator

        def counting_copy(target, source, *args, **kwargs):
            if counter.place(target) in counter.gradients | counter.master_gradients:
                counter.bytes["to_host"][counter.phase] += size(target)
            elif counter.place(source) in counter.masters:
                counter.bytes["to_device"][counter.phase] += size(target)
            return copy_(target, source, *args, **kwargs)

        def counting_to(tensor, *args, **kwargs):
            if args and not isinstance(args[0], torch.dtype) and counter.place(tensor) in counter.gradients:
                counter.bytes["to_device"][counter.phase] += size(tensor)
            return to(tensor, *args, **kwargs)

        def as_on_a_card(tensor):  # a host buffer is not on the accelerator; a CPU accelerator says that it is
            return counter.place(tensor) not in counter.gradients and on_accelerator(tensor)

        torch.Tensor.copy_, torch.Tensor.to, accelerator.on_accelerator = counting_copy, counting_to, as_on_a_card
        try:
            yield self
        finally:
            torch.Tensor.copy_, torch.Tensor.to = copy_, to
            del accelerator.on_accelerator
