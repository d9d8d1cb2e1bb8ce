"""Bytes on one GPU and on the host, by part, for a model under ZeRO-3.

What lies there between steps follows from the shards; what comes on top in a step, from the schedule: `Step.peaks` plays gathers,
releases and activations against each other, event by event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .config import BYTES, resolve
from .coordinator import Unpredictable
from .gathered import padded
from .moduletrace import ModuleTrace
from .schedule import on_host
from .steps import Schedule

# What the recorded H200 runs hold between steps beyond the engine's own tensors, to a few MiB: room for CUDA's matrix libraries.
WORKSPACE = 64 * 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    between: {part: bytes} on the device between steps. peaks: {phase: {part: bytes}} on top of it at that phase's fullest moment.
    host: {part: bytes} in host memory.
    """

    between: dict[str, int]
    peaks: dict[str, dict[str, int]]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def fullest(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=lambda phase: sum(self.peaks[phase].values()))

    @property
    def peak(self) -> int:
        """Largest number of bytes allocated on the device, as `torch.cuda.max_memory_allocated()` counts them."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the peak, by part."""
        parts = dict(self.between)
        for part, size in self.peaks[self.fullest].items():
            parts[part] = parts.get(part, 0) + size
        return {part: size for part, size in parts.items() if size}

    def to_json(self) -> dict:
        return {**vars(self), "peak": self.peak, "fullest": self.fullest, "parts": self.parts}


def memory(
    trace: ModuleTrace,
    schedule: Schedule,
    config: Mapping | None = None,
    dtype: str = "bf16",
    communication: str | None = None,
    torch_adam: bool = False,
    workspace: int = WORKSPACE,
) -> Memory:
    """Memory of a steady step with Adam or AdamW.

    config, dtype, communication: as `schedule` got them. torch_adam: PyTorch's AdamW in place of DeepSpeed's fused one (it takes a
    square root of the second moments beside them). workspace: of the CUDA libraries, bytes.

    Raises Unpredictable without `memory_efficient_linear`. Not in it, since PyTorch's allocator does not hold it either: the CUDA
    context and NCCL's buffers.
    """
    z = resolve(config)
    if not z["memory_efficient_linear"]:
        raise Unpredictable("memory without memory_efficient_linear is not followed: autograd's saved views keep gathered weights alive")
    world, item = schedule.world, BYTES[next(p.dtype or dtype for p in trace.parameters if p.trainable)]
    shards = [padded(p.elements, world) // world for p in trace.parameters]
    held = sum(n * BYTES[p.dtype or dtype] for n, p in zip(shards, trace.parameters))
    trained, tiles = sum(schedule.tiles), schedule.tiles
    here, away = on_host(z["offload_optimizer"], tiles)
    near, away = sum(here), sum(away)

    between = {
        "parameters": 0 if z["offload_param"] else held,
        "gradients": 0 if z["offload_optimizer"] else trained * item,
        "reduce bucket": int(z["reduce_bucket_size"]) * BYTES[communication or dtype] if z["contiguous_gradients"] else 0,
        "master weights": 4 * near,
        "optimizer states": 8 * near,
        "libraries' workspace": workspace,
    }
    host = {
        "parameters": held if z["offload_param"] else 0,
        "gradients": trained * item + 4 * away if z["offload_optimizer"] else 0,
        "master weights": 4 * away,
        "optimizer states": 8 * away,
    }
    names = ("gathered parameters", "activations", "gradients in flight")
    peaks = {phase: dict(zip(names, sizes)) for phase, sizes in schedule.steady.peaks.items()}
    # A tile's gradient is joined (16 bit) and widened (32 bit); torch's AdamW then holds a square root of the same size.
    peaks["step"] = {"optimizer's temporaries": max(here, default=0) * (8 if torch_adam else 4 + item)}
    return Memory({k: v for k, v in between.items() if v}, peaks, {k: v for k, v in host.items() if v})
