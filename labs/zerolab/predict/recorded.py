"""Predictions beside the recorded GPU runs: what their steps cost the host, what memory and time would have been foretold.

Runs where torch is (models are captured again); everything it returns is plain data.
"""

from __future__ import annotations

import json
from dataclasses import replace

from zerolab.ranks.engine import ds_config
from zerolab.report import RESULTS, Report, recorded_machines, results_folder

from .config import arguments
from .fit import COSTS, features, fit
from .memory import memory
from .schedule import schedule
from .specs import trace_of
from .time import Machine, bounds

NAMES = dict(zip(COSTS, ("operator", "hook", "collective", "parameter", "tile")))  # a cost's name in a Machine


def reports(folder: str) -> list[Report]:
    """The labs recorded in a folder of labs/results, in order."""
    return [Report.load(path) for path in sorted((RESULTS / folder).glob("[0-9]*.json"))]


def _timed(found: list[Report]):
    """Timed training steps whose optimizer and threads are those that a Machine's rates stand for."""
    for report in found:
        if report.experiment.get("function"):
            continue  # something of a lab's own was timed, no step
        usual = report.provenance["threads"]
        for variant in report:
            spec = variant.data["variant"]
            if variant.times() and spec.get("threads", usual) == usual and "optimizer" not in spec["ds_config"]:
                yield report, variant, spec


def rows(found: list[Report]) -> list[dict]:
    """What `fit` needs, for every timed variant that offloads nothing (its step waits for copies, not for the host)."""
    kept = []
    for report, variant, spec in _timed(found):
        if any(key.startswith("offload") and value for key, value in spec["zero"].items()):
            continue
        trace = trace_of(spec)
        done = schedule(trace, world=report.provenance["world"], **arguments(ds_config(spec)))
        kept.append({"lab": report.name[:2], "variant": variant.name, "seconds": variant.seconds(), "features": features(trace, done)})
    return kept


def bandwidth(found: list[Report]) -> float:
    """Bus bandwidth in bytes/s that the link had at least: NCCL's kernels also wait for the other rank, so the best record bounds it."""
    best = 0.0
    for report in found:
        for variant in report:
            busy = sum(end - start for start, end in (variant.data.get("timeline") or {"lanes": {"link": []}})["lanes"]["link"])
            if busy:
                share = (report.provenance["world"] - 1) / report.provenance["world"]
                best = max(best, share * sum(c.bytes for c in variant.collectives()) / busy)
    return best


def from_folder(folder: str) -> dict[str, float]:
    """The fitted part of a `Machine` from the runs recorded in a folder."""
    found = reports(folder)
    return {**{NAMES[c]: value for c, value in fit(rows(found)).items()}, "bandwidth": bandwidth(found)}


def time_table() -> list[dict]:
    """Every timed variant with its measured and its foretold seconds: {"folder", "world", "lab", "variant", "measured", "expected", "lower",
    "upper", "busy"}. Where a machine's host costs were fitted to its records, they are fitted anew without the variant at hand, so that no
    run foretells itself; other runs, and those of this machine ("local"), are foretold with the rates of a calibration."""
    table = []
    for folder in recorded_machines():
        found, rates = reports(folder), RESULTS / folder / "machine.json"
        if not found:
            continue
        machine = Machine.load(rates)
        counted = rows(found) if "fitted" in json.loads(rates.read_text()) else []
        for report, variant, spec in _timed(found):
            foreign = machine
            if counted:
                others = [row for row in counted if (row["lab"], row["variant"]) != (report.name[:2], variant.name)]
                foreign = replace(machine, **{NAMES[c]: value for c, value in fit(others).items()})
            table.append({"folder": folder, **_foretold(report, variant, spec, foreign)})
    own = results_folder() / "machine.json"
    here = Machine.load(own if own.exists() else RESULTS / "cpu-x4" / "machine.json")
    for report, variant, spec in _timed([Report.load(path) for path in sorted(results_folder().glob("[0-9]*.json"))]):
        if report.provenance["tier"] == "cpu" and not spec["wire"] and spec["zero"].get("stage", 3) == 3:
            table.append({"folder": "local", **_foretold(report, variant, spec, here)})
    return table


def _foretold(report: Report, variant, spec: dict, machine: Machine) -> dict:
    done = schedule(trace_of(spec), world=report.provenance["world"], machine=machine, **arguments(ds_config(spec)))
    step = done.steady
    low, high = bounds(step.busy)
    row = {"world": report.provenance["world"], "lab": report.name[:2], "variant": variant.name, "measured": variant.seconds()}
    return {**row, "expected": sum(step.seconds.values()), "lower": low, "upper": high, "busy": step.busy}


def memory_table() -> list[dict]:
    """Every variant whose peak was recorded: {"folder", "lab", "variant", "measured", "predicted", "parts", "estimate", "reserved"} in
    bytes. estimate: DeepSpeed's own estimate_zero3_model_states_mem_needs (parameters, gradients, optimizer states, with its factor
    of 1.5 for buffers; no activations)."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    table = []
    for folder in recorded_machines():
        for report in reports(folder):
            for variant in report:
                if not variant.memory.get("allocated"):
                    continue
                spec, world = variant.data["variant"], report.provenance["world"]
                wanted, trace = arguments(ds_config(spec)), trace_of(spec)
                done = schedule(trace, world=world, **wanted)
                found = memory(trace, done, wanted["config"], wanted["dtype"], torch_adam=True)
                layer = max(sum(trace.parameters[p].elements for p in module.parameters) for module in trace.modules)
                away = [bool((spec["zero"].get(key) or {}).get("device")) for key in ("offload_optimizer", "offload_param")]
                _, estimate, _ = estimate_zero3_model_states_mem_needs(
                    trace.elements, layer, num_gpus_per_node=world, cpu_offload=any(away), cpu_offload_params=away[1]
                )
                row = {"folder": folder, "lab": report.name[:2], "variant": variant.name, "measured": variant.memory["allocated"]}
                row |= {"predicted": found.peak, "parts": found.parts, "estimate": estimate, "reserved": variant.memory["reserved"]}
                table.append(row)
    return table
