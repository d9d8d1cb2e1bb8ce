"""`make bench`: the figures of speed that the course promises, printed as a table and saved. Never a timed test."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from zerolab import lab, machine, ranks
from zerolab.experiment import Experiment, accelerator, call
from zerolab.report import paired_ratio

SMALL = {"model": {"size": "tiny", "layers": 4}, "base": {"stage3_param_persistence_threshold": 0}, "seq": 32}


def start_up() -> dict:
    """Seconds from asking for a group of ranks to its first optimizer step done, after the first group."""
    ranks.shutdown()
    begin = time.perf_counter()
    ranks.leader(accelerator(machine.world_size())).ready()
    leader = time.perf_counter() - begin
    groups = []
    for _ in range(6):
        begin = time.perf_counter()
        report = Experiment("bench", {"a": {}}, rounds=0, warmup=1, watch=(), **SMALL).run(save=False, progress=False)
        assert report["a"].ok, report["a"].message
        groups.append(time.perf_counter() - begin)
    return {"leader ready, s": leader, "first group, s": groups[0], "later groups, median s": statistics.median(groups[1:]), "goal": "≤ 3 s"}


def same_variant_twice(times: int = 20) -> dict:
    """How many of `times` A/A comparisons have a 95 % interval that holds 1."""
    held, ratios = 0, []
    for _ in range(times):
        variants = {"a": {"reduce_bucket_size": 1e7}, "again": {"reduce_bucket_size": 1e7}}
        report = Experiment("bench", variants, rounds=6, steps=1, watch=(), fresh=False, **SMALL).run(save=False, progress=False)
        ratio = report.ratio("again")
        ratios.append(str(ratio))
        held += not ratio.sure
    return {"intervals that hold 1": f"{held} of {times}", "goal": "≥ 18 of 20", "ratios": ratios}


def overhead() -> dict:
    """Step time through the library against a bare DeepSpeed loop on the same ranks, interleaved: the ratio's interval holds 1."""
    spec = Experiment("bench", {"a": {"reduce_bucket_size": 1e7}}, **SMALL).spec("a")
    values = call({"call": "zerolab.bench:bare_and_clocked", "arguments": {"spec": spec, "rounds": 12}})
    bare, clocked = values[0]
    return {"library ÷ bare loop": str(paired_ratio(clocked, bare)), "goal": "interval holds 1"}


def bare_and_clocked(rank: int, world: int, device: str, spec: dict, rounds: int):
    """On each rank: seconds of a step, written out as any training script would, and through the clock; one pair a round."""
    import torch

    from zerolab.ranks.engine import Engine
    from zerolab.ranks.rank import Clock

    engine, clock = Engine(spec, rank, device), Clock(device)
    for _ in range(4):
        engine.step()
    bare, clocked = [], []

    def plain():
        torch.distributed.barrier()
        begin = time.perf_counter()
        for batch in engine.batches:
            loss = engine.engine(*batch)
            engine.engine.backward(loss)
            engine.engine.step()
        bare.append(time.perf_counter() - begin)

    def watched():
        clocked.append(clock.measure(engine)["total"])

    for turn in range(rounds):
        for measure in (plain, watched) if turn % 2 else (watched, plain):
            measure()
    return bare, clocked


def labs() -> dict:
    """Wall seconds of each lab's notebook, run as the book runs it, and of all together."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, path in tqdm(lab.files().items(), desc="labs", unit="lab"):
            begin = time.perf_counter()
            command = ["jupytext", "--to", "ipynb", "--execute", "--output", f"{folder}/{number}.ipynb", str(path)]
            done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
            seconds[f"lab {number}, s"] = round(time.perf_counter() - begin, 1)
            if done.returncode:
                tqdm.write(done.stderr[-2000:])
                raise SystemExit(f"lab {number} failed after {seconds.popitem()[1]} s; the others took {seconds}")
            tqdm.write(f"    lab {number}: {seconds[f'lab {number}, s']} s")
    return {**seconds, "all, s": round(sum(seconds.values()), 1), "goal": "≤ 60 s each, ≤ 480 s in all"}


def small_bucket() -> dict:
    """Backward with a bucket of 1e4 elements against one that holds the whole gradient."""
    variants = {"whole": {"reduce_bucket_size": 1e7}, "1e4": {"reduce_bucket_size": 1e4}}
    report = Experiment("bench", variants, rounds=10, steps=1, watch=(), **SMALL).run(save=False, progress=False)
    counts = [v.count("reduce_scatter") for v in report]
    return {"backward ÷ whole": str(report.ratio("1e4", phase="backward")), "reduce-scatters": f"{counts[1]} against {counts[0]}"}


def plan() -> dict:
    """Seconds to plan a 14B on 4 cards and a 72B on 64 with adapters and checkpointing, after imports; and how they grow with tensors."""
    times = call({"work": "plain", "call": "zerolab.bench:plan_seconds", "threads": 1, "limit": 300}, world=1)[0]
    depths = {key: value for key, value in times.items() if key.startswith("layers")}
    growth = [value / int(key.split()[1]) * 1e3 for key, value in depths.items()]
    found = {f"{key}, s": value for key, value in times.items() if key not in depths}
    return {**found, "schedule, ms a layer at 24 to 192 layers": ", ".join(f"{ms:.1f}" for ms in growth), "goal": "≤ 2 s and ≤ 10 s; linear"}


def plan_seconds() -> dict[str, float]:
    """Where torch is: seconds of each plan, and of one schedule at several depths."""
    from zerolab import planning
    from zerolab.predict import family, models, schedule

    rates = planning.rates_of("h200-x2-nvlink").to_json()
    config = planning.resolved({}, "qwen2.5-14b", "hf", None, 16)
    models.plan_json({"model": "tiny", "lora": 8}, config, 4, rates, None)  # lazy imports are not the plan's
    found = {}
    for size, world in (("qwen2.5-14b", 4), ("qwen2.5-72b", 64)):
        begin = time.perf_counter()
        models.plan_json({"model": size, "lora": 8, "checkpointing": "non-reentrant"}, config, world, rates, 16 * 2**30)
        found[f"{size} × {world}"] = time.perf_counter() - begin
    shallow = models.shallow("qwen2.5-14b", 8, "non-reentrant", 1, 1024)
    for layers in (24, 48, 96, 192):
        trace = family.deepen(shallow, layers)
        begin = time.perf_counter()
        schedule(trace, {}, 4)
        found[f"layers {layers}"] = time.perf_counter() - begin
    return found


def random_schedules() -> dict:
    """300 random models × configs: every collective of every step as the engine's own."""
    tests = Path(__file__).resolve().parents[2] / "tests" / "test_schedule.py"
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3000", f"{tests}::test_random_models_and_configs"]
    done = subprocess.run(command, env={**os.environ, "ZEROLAB_EXAMPLES": "300"}, capture_output=True, text=True)
    return {"equal, element for element": "300 of 300" if done.returncode == 0 else done.stdout[-1500:], "goal": "300 of 300"}


BENCHMARKS: dict[str, Callable[[], dict]] = {
    "start-up": start_up,
    "a-a": same_variant_twice,
    "overhead": overhead,
    "small-bucket": small_bucket,
    "plan": plan,
    "random-schedules": random_schedules,
    "labs": labs,
}


def main(which: list[str], out: Path) -> int:
    """Run the named benchmarks (all by default), print each as it ends, keep them in `out`."""
    unknown = set(which) - set(BENCHMARKS)
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
        return 2
    found = {"provenance": machine.provenance(machine.world_size(), "make bench")}
    for name in which or BENCHMARKS:
        print(f"{name}: {BENCHMARKS[name].__doc__.splitlines()[0]}", flush=True)
        found[name] = BENCHMARKS[name]()
        for key, value in found[name].items():
            if isinstance(value, list):
                continue
            print(f"    {key:28} {value:.2f}" if isinstance(value, float) else f"    {key:28} {value}", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1))
    print(f"saved in {out}")
    return 0
