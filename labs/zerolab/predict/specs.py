"""From an experiment's variants to their schedules: build each model on the meta device, capture it once, follow the rules.

Runs where torch is, in a rank process; the notebook's kernel gets JSON.
"""

from __future__ import annotations

import functools
import json


def schedules_json(specs: dict[str, dict], world: int) -> dict[str, str]:
    """{variant: Schedule as JSON} for `Experiment.spec` dicts.

    Raises Unpredictable, KeyError for an unknown model size, and whatever a model's constructor raises.
    """
    from zerolab.predict.schedule import schedule
    from zerolab.ranks.engine import ds_config

    from .config import arguments

    found = {}
    for label, spec in specs.items():
        steps = max(3, spec.get("steps", 3))
        found[label] = schedule(trace_of(spec), world=world, steps=steps, **arguments(ds_config(spec))).to_json()
    return found


def foretold(specs: dict[str, dict], world: int, steps: int) -> dict[str, dict]:
    """{variant: data} as `report.Variant` reads it, for variants that are predicted in place of run: the first `steps` steps of each.

    Raises as `schedules_json`.
    """
    from zerolab.predict.schedule import persistent, schedule
    from zerolab.ranks.engine import ds_config

    from .config import arguments, resolve

    found = {}
    for label, spec in specs.items():
        trace, wanted = trace_of(spec), arguments(ds_config(spec))
        done, zero = schedule(trace, world=world, steps=steps, **wanted), resolve(wanted["config"])
        numel = [p.elements for p in trace.parameters]
        kept = persistent(trace, zero["stage3_param_persistence_threshold"], zero["stage3_model_persistence_threshold"])
        phases = ["forward"] * len(trace.forward) + ["backward"] * len(trace.backward)
        series = [[phase, n] for resident in done.steady.resident for phase, n in zip(phases, resident)]
        series = [now for before, now in zip([None, *series], series) if now != before]
        found[label] = {
            "status": "ok",
            "foretold": True,
            "world": world,
            "collectives": [[[*c.key, 0.0, 0.0] for c in step.collectives] for step in done.steps],
            "resident": {"peak": done.steady.peak_resident, "kept": done.steady.kept, "series": series},
            "sub_groups": done.sub_groups,
            "tiles": done.tiles,
            "model": {
                "elements": trace.elements,
                "trainable": trace.trainable_elements,
                "tensors": len(numel),
                "largest": max(numel),
                "persistent_tensors": len(kept),
                "persistent_elements": sum(numel[p] for p in kept),
            },
        }
    return found


def trace_of(spec: dict):
    """The ModuleTrace of a variant's model and batch, built as the ranks build it but on the meta device. Kept for the next variant."""
    from zerolab.ranks.engine import ds_config

    from .config import arguments, resolve

    wanted = arguments(ds_config(spec))
    linear = bool(resolve(wanted["config"])["memory_efficient_linear"])
    model = json.dumps(spec["model"], sort_keys=True)
    return _trace(model, spec["micro_batch"], spec["seq"], wanted["dtype"], linear)


@functools.lru_cache(maxsize=8)
def _trace(model: str, micro_batch: int, seq: int, dtype: str, linear: bool):
    import torch

    from zerolab.model import shape
    from zerolab.predict import family
    from zerolab.predict.capture import DTYPES, capture, numbered
    from zerolab.ranks.engine import factory

    spec = json.loads(model)
    depth = 0
    if "factory" not in spec:  # the course's decoder: all its inner layers are alike
        depth = shape(**{k: v for k, v in spec.items() if k not in ("lora", "checkpointing")})["layers"]
        spec["layers"] = min(depth, family.SHALLOW)
    build, arguments = factory(spec)
    with torch.device("meta"), numbered():
        module = build(**arguments)
    module.to(next(kind for kind, name in DTYPES.items() if name == dtype))
    trace = capture(module, module.batch(micro_batch, seq, "meta", seed=0), linear=linear)
    return family.deepen(trace, depth) if depth > family.SHALLOW else trace
