"""A plan: what a config will do on given cards, in one dict: collectives, memory, seconds, and which parameter would change it most.

Pure Python: the command line, the notebook's widget and the static planner page all call `plan()`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import arguments, resolve
from .memory import memory
from .moduletrace import ModuleTrace
from .schedule import schedule
from .steps import Schedule
from .time import Machine, bounds

GIB = 2**30
# One change at a time: what a reader could turn. Values at both ends of what templates use.
TURNS = (
    ("offload_param", {"device": "cpu", "pin_memory": True}),
    ("offload_param", None),
    ("offload_optimizer", {"device": "cpu", "pin_memory": True}),
    ("offload_optimizer", None),
    ("stage3_prefetch_bucket_size", 0),
    ("stage3_prefetch_bucket_size", int(5e8)),
    ("stage3_max_live_parameters", int(2e7)),
    ("stage3_max_live_parameters", int(1e9)),
    ("stage3_max_reuse_distance", 0),
    ("stage3_param_persistence_threshold", 0),
    ("stage3_param_persistence_threshold", int(1e6)),
    ("reduce_bucket_size", int(2e7)),
)


def plan(
    trace: ModuleTrace,
    ds_config: Mapping,
    world: int,
    machine: Machine,
    gpu_memory: float | None = None,
    turns: bool = True,
    keep: bool = False,
) -> dict:
    """What `ds_config` does with the model of `trace` on `world` ranks of `machine`, as plain data (see `describe` for the keys).

    gpu_memory: bytes of one card; then "fits" says whether the peak leaves room. turns: also try each of `TURNS`. keep: also keep
    the lanes' busy intervals. Raises Unpredictable for what is not followed.
    """
    found, done = _outcome(trace, ds_config, world, machine, keep=keep)
    found["model"] = {
        "elements": trace.elements,
        "trainable": trace.trainable_elements,
        "tensors": len(trace.parameters),
    }
    found["world"], found["machine"] = world, machine.name
    peak = found["memory"]["peak"]
    found["fits"] = None if gpu_memory is None else peak <= gpu_memory
    if gpu_memory is not None:
        found["gpu_memory"] = gpu_memory
    if keep:
        found["lanes"] = done.steady.lanes
    if turns:
        found["turns"] = _turns(trace, ds_config, world, machine, found)
    return found


def _outcome(trace, ds_config, world, machine, steps=3, keep=False) -> tuple[dict, Schedule]:
    wanted = arguments(ds_config)
    done = schedule(trace, world=world, steps=steps, machine=machine, keep=keep, **wanted)
    step = done.steady
    torch_adam = bool(((ds_config.get("optimizer") or {}).get("params") or {}).get("torch_adam"))
    fullest = memory(trace, done, wanted["config"], wanted["dtype"], wanted["communication"], torch_adam)
    low, high = bounds(step.busy)
    gathered = step.elements(op="all_gather")
    found = {
        "collectives": [[*key, *numbers] for key, numbers in step.table().items()],
        "reasons": {why: list(numbers) for why, numbers in step.reasons().items()},
        "gathered": gathered,
        "passes": done.passes,
        "received": step.bytes() * (world - 1) // world,
        "kept": step.kept_to_backward,
        "peak_resident": step.peak_resident,
        "persistent": step.persistent,
        "tiles": done.sub_groups,
        "accumulation": done.accumulation,
        "memory": fullest.to_json(),
        "seconds": {"lower": low, "expected": sum(step.seconds.values()), "upper": high, "phases": step.seconds, "busy": step.busy},
    }
    return found, done


def _turns(trace, ds_config, world, machine, base) -> list[dict]:
    """Each turn's effect: step time as a ratio, peak memory as a difference in bytes; the largest effect on time first."""
    zero = dict(ds_config.get("zero_optimization") or {})
    now = resolve(zero)  # what the config leaves out is at its default
    micro_steps = base["accumulation"]
    found = []
    for key, value in TURNS:
        if now[key] == value or (isinstance(value, dict) and now[key]):
            continue
        # One micro-step stands for all: they differ from each other far less than turns do.
        changed = {**ds_config, "zero_optimization": {**zero, key: value}, "gradient_accumulation_steps": 1}
        outcome, _ = _outcome(trace, changed, world, machine, steps=2)
        phases = outcome["seconds"]["phases"]
        ratio = (micro_steps * (phases["forward"] + phases["backward"]) + phases["step"]) / base["seconds"]["expected"]
        more = outcome["memory"]["peak"] - base["memory"]["peak"]
        found.append({"key": key, "value": value, "time": ratio, "memory": more})
    return sorted(found, key=lambda turn: -abs(turn["time"] - 1))


def describe(found: Mapping) -> str:
    """A plan as text for a terminal."""

    def gib(size):
        return f"{size / GIB:.2f} GiB"

    m, s, memory = found["model"], found["seconds"], found["memory"]
    lines = [
        f"{m['elements']:,} elements in {m['tensors']} tensors, {m['trainable']:,} trained; {found['world']} ranks; rates of {found['machine']}",
        "",
        "collectives of a steady step       count          elements",
    ]
    for op, phase, count, elements, _ in found["collectives"]:
        lines.append(f"  {phase:9}{op:22}{count:>7,}{elements:>18,}")
    lines += [
        f"  the model is gathered {found['passes']:.2f} times a micro-step; a rank receives {gib(found['received'])} a step",
        f"  gathered at once at most {found['peak_resident']:,} elements; kept into backward {found['kept']:,}",
        "",
        f"memory of one card at its fullest ({memory['fullest']})",
    ]
    lines += [f"  {part:26}{gib(size):>14}" for part, size in memory["parts"].items()]
    lines.append(f"  {'peak':26}{gib(memory['peak']):>14}{_verdict(found, gib)}")
    lines += [f"  on the host: {part:13}{gib(size):>14}" for part, size in memory["host"].items()]
    low, high = s["lower"], s["upper"]
    lines += ["", f"seconds a step: {s['expected']:.3g} expected; {low:.3g} if everything overlaps, {high:.3g} if nothing does"]
    lines.append("  " + ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in s["busy"].items() if seconds))
    if found.get("turns"):
        lines += ["", "one change at a time                                     step time      peak"]
        for turn in found["turns"]:
            value = "off" if turn["value"] is None else turn["value"]["device"] if isinstance(turn["value"], dict) else f"{turn['value']:,}"
            lines.append(f"  {turn['key'] + ' = ' + value:54}×{turn['time']:.2f}{turn['memory'] / GIB:>+11.2f} GiB")
    return "\n".join(lines)


def _verdict(found: Mapping, gib) -> str:
    if found["fits"] is None:
        return ""
    limit = found["gpu_memory"]
    if found["fits"]:
        return f"   fits {gib(limit)}; the CUDA context, NCCL and unused parts of blocks take from the rest"
    return f"   does not fit {gib(limit)}"
