"""`zerolab calibrate`: the rates of this machine that a prediction of time needs, measured in about a minute and kept as `machine.json`.

Every rate is the median of repetitions with nothing attached. What the host spends on a module's hook, a collective and an optimizer
sub-group is found by difference, between small engines that differ in exactly that.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from pathlib import Path

from zerolab import machine
from zerolab.experiment import call, facts
from zerolab.progress import Progress

SMALL = {"size": "tiny", "hidden": 64, "ffn": 128, "layers": 16, "vocab": 512}
LATENCY = 20e-6  # s of one NCCL collective between two cards: assumed, and hidden behind the host's own cost of one
VARIANTS = {
    # everything stays gathered: hooks alone; then many small gathers, few large ones, many sub-groups
    "persistent": {"stage3_param_persistence_threshold": 1e9},
    "single gathers": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "joint gathers": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5e8, "stage3_max_reuse_distance": 0},
    "many tiles": {"stage3_param_persistence_threshold": 1e9, "sub_group_size": 1},
}
OF_A_LINK = ("latency", "bandwidth", "collective", "parameter")  # what one rank alone cannot measure
ELSEWHERE = "h200-x2-nvlink"
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def main(out: Path | None, world: int | None = None) -> int:
    """Measure, print, save in `out` (default: machine.json in this machine's folder of results)."""
    from zerolab import planning
    from zerolab.report import results_folder

    world = world or machine.world_size()

    out = out or results_folder() / "machine.json"
    bar = Progress(3, "calibrating: rates of the device and the link")
    try:
        rates = call({"call": "zerolab.calibrate:rates", "limit": 300}, world)
        bar.update()
        bar.say("calibrating: what the host spends on hooks, collectives, sub-groups")
        costs = call({"call": "zerolab.calibrate:costs", "arguments": {"specs": specs(world)}, "limit": 300}, world)
        bar.update()
        bar.say("calibrating: an optimizer step on the host")
        on_host = call({"call": "zerolab.calibrate:host_step", "arguments": {"variants": {"host": host_spec(world)}}, "limit": 300}, world)
        bar.update()
    finally:
        bar.close()
    found = {key: statistics.median(r[key] for r in rates) for key in rates[0]}
    found.update(solve({key: statistics.median(c[key] for c in costs) for key in costs[0]}, found, world))
    found["host_step"] = statistics.median(on_host)
    source = f"zerolab calibrate, {world} ranks"
    if world == 1:
        other = planning.rates_of(ELSEWHERE)
        found.update({key: getattr(other, key) for key in OF_A_LINK})
        source = f"zerolab calibrate, one rank; {', '.join(OF_A_LINK)}: no link here, those of {ELSEWHERE}"
    found.update(name=machine.folder_name(world), source=source, shared=machine.tier(world) == "cpu")
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance = {**machine.provenance(world, "zerolab calibrate"), **facts(world)}
    out.write_text(json.dumps({"machine": found, "provenance": provenance}, indent=1))
    for key, value in found.items():
        print(f"  {key:12} {value:.4g}" if isinstance(value, float) else f"  {key:12} {value}")
    print(f"saved in {out}")
    return 0


def from_records(folder: str, rates_file: Path) -> int:
    """For cards that can no longer be asked: host costs fitted to the runs recorded in a folder, the link bounded by them, the device's
    own rates from a calibration of one such card. Written to the folder's machine.json."""
    from zerolab.report import RESULTS

    measured = json.loads(rates_file.read_text())
    job = {"work": "plain", "call": "zerolab.predict.recorded:from_folder", "threads": 1, "limit": 300, "arguments": {"folder": folder}}
    fitted = call(job, world=1)[0]
    found = {**measured["machine"], **fitted, "name": folder, "shared": False}
    found["latency"] = LATENCY
    found["source"] = (
        f"device rates: zerolab calibrate on one {measured['provenance']['devices'][0]}, {measured['provenance']['date']}; host costs: fitted to "
        f"the step times recorded in {folder}; bandwidth: at least that of its fastest recorded timeline; latency: assumed"
    )
    path = RESULTS / folder / "machine.json"
    record = {"machine": found, "fitted": sorted(fitted), "provenance": measured["provenance"]}
    path.write_text(json.dumps(record, indent=1))
    print(f"saved in {path}")
    return 0


def specs(world: int) -> dict[str, dict]:
    from zerolab.experiment import Experiment

    experiment = Experiment("calibrate", VARIANTS, model=SMALL, seq=16, world=world)
    return {label: experiment.spec(label) for label in VARIANTS}


def host_spec(world: int) -> dict:
    """An engine whose optimizer lives on the host: large enough on a GPU that its elements count, not its calls."""
    from zerolab.experiment import Experiment

    wide = {"hidden": 1024, "ffn": 4096} if machine.tier(world) == "gpu" else {}
    return Experiment("calibrate", {"host": ON_HOST}, model={"size": "tiny", **wide}, seq=16, world=world).spec("host")


def solve(seconds: dict[str, float], rates: dict[str, float], world: int) -> dict[str, float]:
    """Host seconds of a hook, a tile, and with a link of a collective and a parameter in it; from the engines' times and their
    predicted schedules."""
    job = {"work": "plain", "call": "zerolab.calibrate:counts", "threads": 1, "arguments": {"specs": specs(world), "world": world}}
    counts = call(job, world=1)[0]
    plain = counts["persistent"]
    hook = max(0.0, seconds["persistent"] - plain["operators"] * rates["operator"]) / plain["hooks"]
    tile = (seconds["many tiles, step"] - seconds["persistent, step"]) / (counts["many tiles"]["tiles"] - plain["tiles"])
    found = {"hook": hook, "tile": max(0.0, tile)}
    if world == 1:
        return found
    # On a CPU the wire is waited for, so it is taken off; on a GPU it runs beside the host.
    wire = rates["latency"] if machine.tier(world) == "cpu" else 0.0

    def gathers(label):
        return seconds[label] - seconds["persistent"] - wire * (counts[label]["collectives"] - plain["collectives"])

    (n, p), (m, q) = [
        [counts[label][key] - plain[key] for key in ("collectives", "parameters")] for label in ("single gathers", "joint gathers")
    ]
    joint, single = gathers("joint gathers"), gathers("single gathers")
    parameter = max(0.0, (joint * n - single * m) / (q * n - p * m))
    collective = max(0.0, (single - p * parameter) / n)
    return {**found, "collective": collective, "parameter": parameter}


def counts(specs: dict[str, dict], world: int) -> dict[str, dict[str, int]]:
    """What each engine does in forward and backward of a step, worked out; runs where torch is."""
    from zerolab.predict.config import arguments
    from zerolab.predict.fit import features
    from zerolab.predict.schedule import schedule
    from zerolab.predict.specs import trace_of
    from zerolab.ranks.engine import ds_config

    found = {}
    for label, spec in specs.items():
        trace = trace_of(spec)
        found[label] = features(trace, schedule(trace, world=world, **arguments(ds_config(spec))), phases=("forward", "backward"))
    return found


# --- on the ranks ---


def median_of(run, device: str, repeat: int = 7) -> float:
    import torch

    samples = []
    for _ in range(repeat + 2):
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[2:])


def rates(rank: int, world: int, device: str) -> dict[str, float]:
    """Rates of the device, the link, the host's Adam and the copies between host and device. All ranks measure at the same time."""
    import torch

    cuda = device != "cpu"
    n = 8192 if cuda else 768
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in "ab")
    found = {"flops": 2 * n**3 / median_of(lambda: a @ b, device)}
    block = torch.empty(2**28 if cuda else 2**23, device=device)
    other = torch.empty_like(block)
    found["memory"] = 2 * 4 * block.numel() / median_of(lambda: other.copy_(block), device)

    if world > 1:
        found.update(link_rates(rank, world, device))
    for kind in ("pageable", "pinned"):
        found[kind] = copy_rate(device, pinned=kind == "pinned")
    found["operator"] = operator_seconds(device)
    return found


def link_rates(rank: int, world: int, device: str) -> dict[str, float]:
    """Seconds of a small all-gather, and bus bandwidth of a large one."""
    import torch
    import torch.distributed as dist

    sizes = [2**k for k in (range(14, 29, 2) if device != "cpu" else range(12, 24, 2))]
    points = []
    for size in sizes:
        full = torch.empty(size, device=device, dtype=torch.uint8)
        part = full.chunk(world)[rank].clone()
        dist.barrier()
        seconds = median_of(partial(dist.all_gather_into_tensor, full, part), device)
        points.append((size * (world - 1) / world, seconds))
    latency = statistics.median(t for _, t in points[:3])
    size, seconds = points[-1]
    return {"latency": latency, "bandwidth": size / max(seconds - latency, 1e-9)}


def copy_rate(device: str, pinned: bool) -> float:
    """Bytes/s from host memory that no cache holds (shards of a model are read once a pass)."""
    import torch

    size, pieces = (2**25, 64) if device != "cpu" else (2**20, 64)
    host = torch.ones(pieces, size, dtype=torch.uint8)
    if pinned and device != "cpu":
        host = host.pin_memory()

    def run():
        for piece in host:
            piece.to(device, copy=True)

    return host.numel() / median_of(run, device, repeat=3)


def operator_seconds(device: str) -> float:
    """Host seconds for one operator of the small model's forward and backward in plain PyTorch."""
    import torch

    from zerolab.model import build
    from zerolab.predict.meter import Meter

    model = build(**SMALL).to(device, torch.bfloat16)
    batch = model.batch(1, 16, device, 0)

    def run():
        model(*batch).backward()

    with Meter() as meter:
        run()
    return median_of(run, device) / meter.operators


def costs(rank: int, world: int, device: str, specs: dict[str, dict]) -> dict[str, float]:
    """Seconds of forward and backward of each small engine, and of the optimizer step of some."""
    from zerolab.ranks.engine import Engine
    from zerolab.ranks.rank import Clock

    clock, found = Clock(device), {}
    engines = {label: Engine(spec, rank, device) for label, spec in specs.items()}
    samples: dict[str, list[dict]] = {label: [] for label in engines}
    for turn in range(12):
        for label, engine in engines.items():
            sample = clock.measure(engine)
            if turn >= 4:
                samples[label].append(sample)
    for label, taken in samples.items():
        found[label] = statistics.median(s["forward"] + s["backward"] for s in taken)
        found[f"{label}, step"] = statistics.median(s["step"] for s in taken)
    return found


def host_step(rank: int, world: int, device: str, variants: dict[str, dict]) -> float:
    """Elements/s of an optimizer step on the host, as this rank's share goes through it."""
    from zerolab.ranks.engine import Engine
    from zerolab.ranks.rank import Clock

    clock, engine = Clock(device), Engine(variants["host"], rank, device)
    samples = [clock.measure(engine)["step"] for _ in range(8)]
    return sum(t.numel() for t in engine.optimizer.fp32_partitioned_groups_flat) / statistics.median(samples[3:])
