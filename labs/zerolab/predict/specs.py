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

    from zerolab.predict.capture import DTYPES, capture, numbered
    from zerolab.ranks.engine import factory

    build, arguments = factory(json.loads(model))
    with torch.device("meta"), numbered():
        module = build(**arguments)
    module.to(next(kind for kind, name in DTYPES.items() if name == dtype))
    return capture(module, module.batch(micro_batch, seq, "meta", seed=0), linear=linear)
