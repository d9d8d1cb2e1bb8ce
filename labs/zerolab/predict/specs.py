"""From an experiment's variants to their schedules: build each model on the meta device, capture it once, follow the rules."""

from __future__ import annotations

import json


def schedules_json(specs: dict[str, dict], world: int) -> dict[str, str]:
    """{variant: Schedule as JSON} for `Experiment.spec` dicts. Runs where torch is: in a rank process, on no device.

    Raises Unpredictable, KeyError for an unknown model size, and whatever a model's constructor raises.
    """
    from zerolab.predict.schedule import schedule

    traces: dict[str, object] = {}
    found = {}
    for label, spec in specs.items():
        key = json.dumps([spec["model"], spec["micro_batch"], spec["seq"]], sort_keys=True)
        if key not in traces:
            traces[key] = trace_of(spec)
        steps = max(3, spec.get("steps", 3))
        found[label] = schedule(traces[key], spec["zero"], world, spec["accumulation"], steps=steps).to_json()
    return found


def trace_of(spec: dict):
    """The ModuleTrace of a variant's model and batch, built as the ranks build it but on the meta device."""
    import torch

    from zerolab.predict.capture import capture, numbered
    from zerolab.ranks.engine import factory

    build, arguments = factory(spec["model"])
    with torch.device("meta"), numbered():
        module = build(**arguments)
    batch = module.batch(spec["micro_batch"], spec["seq"], "meta", seed=0)
    return capture(module, batch)
