"""Which streams DeepSpeed gave its gathers and its gradient reduction, and which collectives it does not wait for at once."""

from __future__ import annotations


def streams(rank: int, world: int, device: str, variants: dict) -> dict:
    """{variant: {"streams": {"gather", "reduce"}, "asynchronous": {op: share}}} of one training step each, seen on this rank.

    variants: {name: `Experiment.spec`}. A stream is "none" (a device without streams), "default" or "its own". share: of the
    collectives of that op, in forward and backward, how many returned a handle instead of being waited for.
    """
    return {name: _one(variant, rank, world, device) for name, variant in variants.items()}


def _one(variant, rank, world, device):
    from zerolab.ranks.engine import Engine
    from zerolab.ranks.wire import Wire

    engine = Engine(variant, rank, device)
    found = {
        "gather": _kind(engine.coordinator._PartitionedParameterCoordinator__allgather_stream),
        "reduce": _kind(engine.optimizer.reduce_and_partition_stream),
    }
    wire = Wire(world)

    def mark(phase, micro):
        wire.phase, wire.micro = phase, micro

    wire.attach()
    try:
        engine.step(mark)
    finally:
        wire.detach()
    flags: dict[str, list[bool]] = {"all_gather": [], "reduce_scatter": []}
    for collective, asynchronous in zip(wire.collectives(), wire.asynchronous):
        if collective.op in flags and collective.phase != "step":
            flags[collective.op].append(asynchronous)
    engine.destroy()
    return {"streams": found, "asynchronous": {op: sum(seen) / len(seen) for op, seen in flags.items() if seen}}


def _kind(stream) -> str:
    from deepspeed.accelerator import get_accelerator

    if stream is None:
        return "none"
    return "default" if stream == get_accelerator().default_stream() else "its own"
