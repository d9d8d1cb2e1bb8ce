"""The host's part of an optimizer step, timed alone: what an offloaded optimizer asks of the CPU."""

from __future__ import annotations

import time


def adam(rank: int, world: int, device: str, variants: dict, elements: int, rounds: int) -> dict:
    """Seconds of one optimizer step on the host for each variant, in rotating order; rank 0 works, the others wait.

    variants: {label: spec}; a spec's "threads" is the number of CPU threads, torch's AdamW is used where its ds_config says
    `torch_adam`, else DeepSpeedCPUAdam. elements: fp32 weights of one rank's shard. Returns {label: {"times": …}} as `Report`
    keeps it, one step a round after two that warm up.
    """
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if rank:
        torch.distributed.barrier()
        return {}
    weights = torch.nn.Parameter(torch.randn(elements))
    weights.grad = torch.randn(elements)
    kinds = {}
    for label, spec in variants.items():
        config = spec["ds_config"].get("optimizer", {}).get("params", {})
        kinds[label] = (torch.optim.AdamW if config.get("torch_adam") else DeepSpeedCPUAdam)([weights], lr=1e-4)

    def seconds(label):
        torch.set_num_threads(variants[label]["threads"])
        begin = time.perf_counter()
        kinds[label].step()
        return time.perf_counter() - begin

    for label in [*kinds, *kinds]:
        seconds(label)
    names, times = list(kinds), {label: [] for label in kinds}
    for turn in range(rounds):
        shift = turn % len(names)
        for label in names[shift:] + names[:shift]:
            times[label].append([{"total": seconds(label)}])
    torch.distributed.barrier()
    return {label: {"times": blocks, "elements": elements} for label, blocks in times.items()}


def holdings(rank: int, world: int, device: str, variants: dict) -> dict:
    """What each rank keeps for each variant, from an engine that trains nothing: {label: {"holdings", "model", "pinned"}}.

    The optimizer makes its states at its first step, so it makes one, with gradients of zero.
    """
    from zerolab.ranks import probe
    from zerolab.ranks.engine import Engine

    found = {}
    for label, variant in variants.items():
        pinned: dict = {}
        with probe.pin_requests(pinned):
            engine = Engine(variant, rank, device)
        for sub_group in range(len(engine.optimizer.fp16_groups)):
            engine.optimizer._optimizer_step(sub_group)
        trainable = sum(p.ds_numel for p in engine.parameters if p.requires_grad)
        model = {"elements": sum(p.ds_numel for p in engine.parameters), "trainable": trainable}
        found[label] = {"holdings": probe.holdings(engine), "model": model, "pinned": pinned, "world": world}
        engine.destroy()
    return found
