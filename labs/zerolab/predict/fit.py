"""A machine's host costs from runs that are already recorded, and how well a prediction with them does on the others.

On the recorded GPUs a step's time is what the host spends on operators, hooks and collectives, since everything else hides behind it;
so five costs, fitted to step times, are enough.
"""

from __future__ import annotations

import statistics

from .moduletrace import ModuleTrace
from .schedule import Schedule

COSTS = ("operators", "hooks", "collectives", "parameters", "tiles")
MARKERS = ("G", "L", "X")  # events that are no module's hook


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


def seconds(costs: dict[str, float], counts: dict[str, int]) -> float:
    return sum(costs[c] * counts[c] for c in COSTS)


def left_out(rows: list[dict]) -> list[dict]:
    """Each row with the seconds that a fit to the *other* labs gives it: {"lab", "variant", "seconds", "predicted"}."""
    found = []
    for lab in sorted({row["lab"] for row in rows}):
        costs = fit([row for row in rows if row["lab"] != lab])
        found += [{**row, "predicted": seconds(costs, row["features"])} for row in rows if row["lab"] == lab]
    return found


def typical(errors: list[float]) -> tuple[float, float]:
    """Median and largest absolute relative error."""
    sizes = [abs(e) for e in errors]
    return statistics.median(sizes), max(sizes)


# --- from recorded runs; needs torch ---


def rows(reports: list) -> list[dict]:
    """What `fit` needs, for every timed variant of recorded reports that offloads nothing (its step waits for copies, not for the host)."""
    from zerolab.ranks.engine import ds_config

    from .config import arguments
    from .schedule import schedule
    from .specs import trace_of

    found = []
    for report in reports:
        for variant in report:
            spec = variant.data.get("variant")
            if not variant.times() or any(key.startswith("offload") and value for key, value in spec["zero"].items()):
                continue
            predicted = schedule(trace_of(spec), world=report.provenance["world"], **arguments(ds_config(spec)))
            counts = features(trace_of(spec), predicted)
            found.append({"lab": report.name[:2], "variant": variant.name, "seconds": variant.seconds(), "features": counts})
    return found


def bandwidth(reports: list) -> float:
    """Bus bandwidth in bytes/s that the link had at least: NCCL's kernels also wait for the other rank, so the best record bounds it."""
    best = 0.0
    for report in reports:
        for variant in report:
            busy = sum(end - start for start, end in (variant.data.get("timeline") or {"lanes": {"link": []}})["lanes"]["link"])
            if busy:
                share = (report.provenance["world"] - 1) / report.provenance["world"]
                best = max(best, share * sum(c.bytes for c in variant.collectives()) / busy)
    return best


def from_folder(folder: str) -> dict[str, float]:
    """The fitted part of a `Machine` from the runs recorded in a folder of labs/results."""
    from zerolab.report import RESULTS, Report

    reports = [Report.load(path) for path in sorted((RESULTS / folder).glob("[0-9]*.json"))]
    costs = fit(rows(reports))
    names = dict(zip(COSTS, ("operator", "hook", "collective", "parameter", "tile")))
    return {**{names[c]: value for c, value in costs.items()}, "bandwidth": bandwidth(reports)}
