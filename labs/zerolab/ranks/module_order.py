"""Training steps whose module order changes: a decoder that leaves out a layer at some steps, or is evaluated between two.

DeepSpeed prefetches along the order of modules that it recorded; these functions show what it gathers when the order differs.
"""

from __future__ import annotations

import contextlib


def collectives(rank: int, world: int, device: str, variants: dict, left_out: dict, evaluated: dict) -> dict:
    """{variant: {"collectives": one list a step, "complete": one bool a step}} of several training runs, as rank 0 saw them.

    variants: {name: `Experiment.spec`}, of decoders without LoRA. left_out: {name: [index of the layer to leave out or None, ...]},
    one entry a step. evaluated: {name: steps after which the model runs once more without gradients}. "complete" says whether
    DeepSpeed had a complete trace when the step ended.
    """
    return {
        name: _steps(variant, left_out[name], evaluated.get(name, ()), rank, world, device)
        for name, variant in variants.items()
    }


def _steps(variant, left_out, evaluated, rank, world, device):
    import torch

    from zerolab.ranks.engine import Engine
    from zerolab.ranks.wire import Wire

    engine = Engine(variant, rank, device)
    wire = Wire(world)
    result = {"collectives": [], "complete": []}

    def mark(phase, micro):
        wire.phase, wire.micro = phase, micro

    wire.attach()
    try:
        for step, index in enumerate(left_out):
            wire.begin()
            with _without(engine.module.model.layers, index):
                engine.step(mark)
            result["collectives"].append([list(c) for c in wire.collectives()])
            result["complete"].append(engine.coordinator.is_complete_trace())
            if step in evaluated:
                with torch.no_grad():
                    engine.engine(*engine.batches[0])
    finally:
        wire.detach()
    engine.destroy()
    return result


@contextlib.contextmanager
def _without(layers, index):
    """While the block runs, a layer hands its input on and none of the modules inside it is called."""
    if index is None:
        yield
        return
    own = layers[index].__dict__
    before = own.get("forward")
    own["forward"] = lambda x, rotary: x
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
