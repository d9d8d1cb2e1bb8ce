"""A machine's host costs from runs that are already recorded, and how well a prediction with them does on the others.

On the recorded GPUs a step's time is what the host spends on operators, hooks and collectives, since everything else hides behind it;
so five costs, fitted to step times, are enough.
"""

from __future__ import annotations

import statistics

from .moduletrace import ACCESS, GRADIENT, LINEAR, ModuleTrace
from .steps import Schedule

COSTS = ("operators", "hooks", "collectives", "parameters", "tiles")
MARKERS = (GRADIENT, LINEAR, ACCESS)  # events that are no module's hook


def features(trace: ModuleTrace, schedule: Schedule, phases: tuple[str, ...] = ("forward", "backward", "step")) -> dict[str, int]:
    """How often a steady step makes the host pay for something: {cost: count}."""
    step = schedule.steady
    sent = [params for c, params in zip(step.collectives, step.params) if params and c.phase in phases]
    return {
        "operators": sum(s[4] for s in trace.forward_spans + trace.backward_spans) * schedule.accumulation,
        "hooks": sum(e[0] not in MARKERS for e in trace.forward + trace.backward) * schedule.accumulation,
        "collectives": len(sent),
        "parameters": sum(len(p) for p in sent),
        "tiles": schedule.sub_groups,
    }


def fit(rows: list[dict]) -> dict[str, float]:
    """Seconds for each cost. rows: {"features": ..., "seconds": ...}; each counts by its relative error, no cost is negative."""
    import numpy as np
    from scipy.optimize import nnls

    matrix = np.array([[row["features"][c] / row["seconds"] for c in COSTS] for row in rows])
    scale = np.linalg.norm(matrix, axis=0)
    found, _ = nnls(matrix / scale, np.ones(len(rows)))
    return dict(zip(COSTS, (found / scale).tolist()))


def typical(errors: list[float]) -> tuple[float, float]:
    """Median and largest absolute relative error."""
    sizes = [abs(e) for e in errors]
    return statistics.median(sizes), max(sizes)
