"""What one rank does: join the group, then clock variants, watch them, or call a function.

Rank 0 (and any rank that fails) tells the leader with plain dicts. Started by the leader's fork, or by any launcher that sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT: `deepspeed --hostfile hosts --module zerolab.ranks.rank JOB.json OUT.jsonl`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def join(rank: int, world: int, job: dict, store: str | None = None) -> str:
    """Make this process rank `rank` of `world`; returns its device. store: a fresh file path, None takes the launcher's."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("LOCAL_RANK", str(rank))
    os.environ.setdefault("LOCAL_SIZE", str(world))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    if store and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from zerolab.ranks import bf16

    torch.set_num_threads(job["threads"])
    cuda = get_accelerator().device_name().startswith("cuda")
    device = "cpu"
    if cuda:
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
        if job.get("cap"):
            total = torch.cuda.get_device_properties(local).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job["cap"] * 2**30 / total))
    else:
        if bf16.wanted():
            bf16.install()
        if job.get("cap"):
            _cap_host_memory(job["cap"])
    place = dict(init_method=f"file://{store}", rank=rank, world_size=world) if store else {}
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False, **place)
    return device


def share_cores(rank: int, world: int, job: dict) -> None:
    """Where there are fewer cores than ranks, the same number of one-threaded ranks for each: keep a rank on its core, and let no
    thread interrupt another.

    A gloo message wakes three threads of a rank. Across cores, and each time in place of whoever computes, that costs more
    than the message. `deepspeed --bind_cores_to_rank` binds ranks, too. A rank that sleeps on an emulated wire must wake on time, so it may
    interrupt.
    """
    if job["work"] == "plain" or os.environ.get("DS_ACCELERATOR") == "cuda" or not hasattr(os, "SCHED_BATCH"):
        return
    variants = job.get("variants") or job.get("arguments", {}).get("variants") or {}
    threads = [job["threads"], *(variant.get("threads") or 1 for variant in variants.values())]
    cores = sorted(os.sched_getaffinity(0))
    if max(threads) == 1 and len(cores) < world and world % len(cores) == 0:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        if not any(variant.get("wire") for variant in variants.values()):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def drop_shared_buffers() -> None:
    """Remove the shared-memory files that DeepSpeed's extension makes for this MASTER_PORT and leaves behind: 66 MiB a rank."""
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{os.environ['MASTER_PORT']}_*"):
        file.unlink(missing_ok=True)


def _cap_host_memory(gib: float):
    """Let allocations beyond `gib` fail in this process: a card's limit, on the CPU tier."""
    import resource

    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class Clock:
    """Time stamps at phase borders: host clock on a CPU, events in the stream on a GPU (no synchronisation inside a step)."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        self.stamps: list = []

    def mark(self, phase, micro):
        if self.cuda:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.stamps.append((phase, event))
        else:
            self.stamps.append((phase, time.perf_counter()))

    def measure(self, engine, settle=None) -> dict:
        """Seconds of one optimizer step: {"total", "forward", "backward", "step"}."""
        import torch

        self.stamps = []
        if self.cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier()
        begin = time.perf_counter()
        engine.step(self.mark, settle)
        self.mark("end", 0)
        if self.cuda:
            torch.cuda.synchronize()
        total = time.perf_counter() - begin
        seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        for (phase, start), (_, end) in zip(self.stamps, self.stamps[1:]):
            seconds[phase] += start.elapsed_time(end) / 1e3 if self.cuda else end - start
        return {"total": total, **seconds}


def clock(job: dict, rank: int, world: int, device: str, tell) -> None:
    """All variants of the job side by side: warm-up, then rounds in rotating order with nothing attached.

    Tells {"event": "times", "variant", "round", "steps": [{"total", "forward", "backward", "step"}]} for each block. With
    job["then_watch"] the warm-up is watched, and the parts of the watch pass follow the last round (see `watch`).
    """
    from zerolab.ranks.engine import Engine
    from zerolab.ranks.watch import Watch
    from zerolab.ranks.wire import Wire

    engines, wires, watched = {}, {}, {}
    for name, variant in job["variants"].items():
        tell({"event": "at", "variant": name, "doing": "building"})
        if job.get("then_watch"):
            watched[name] = Watch(variant, rank, world, device)
        engines[name] = watched[name].engine if watched else Engine(variant, rank, device)
        if variant.get("wire"):
            wires[name] = Wire(world, variant["wire"])
    timer = Clock(device)

    def block(name, steps):
        wire = wires.get(name)
        if wire:
            wire.attach()
        try:
            samples = []
            for _ in range(steps):
                tell({"event": "beat"})  # a sign of life, between timed steps
                if wire:
                    wire.begin()
                samples.append(timer.measure(engines[name], wire.settle if wire else None))
            return samples
        finally:
            if wire:
                wire.detach()

    def warm_up(name):
        if not watched:
            block(name, 1)
            return
        tell({"event": "beat"})
        watched[name].step()

    for name in engines:
        tell({"event": "at", "variant": name, "doing": "warming up"})
        begin = time.perf_counter()
        warm_up(name)
        tell({"event": "first", "variant": name, "seconds": time.perf_counter() - begin})
        for _ in range(job["warmup"] - 1):
            warm_up(name)
        if watched:
            watched[name].holdings()
    names = list(engines)
    for turn in range(job["rounds"]):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            tell({"event": "at", "variant": name, "doing": f"round {turn + 1} of {job['rounds']}"})
            samples = block(name, job["steps"])
            tell({"event": "times", "variant": name, "round": turn, "steps": samples})
            if device.startswith("cuda"):
                import torch

                peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
                tell({"event": "memory", "variant": name, "alone": len(names) == 1, **peak})
    for name in names:
        if watched:
            tell({"event": "at", "variant": name, "doing": "watching"})
            tell({"event": "watched", "variant": name, **watched[name].finish(job["parts"])})
        else:
            engines[name].destroy()


def watch(job: dict, rank: int, world: int, device: str, tell) -> None:
    """Each variant of the job in turn, everything attached: collectives of every step, residency, holdings, memory, timeline.

    Tells {"event": "watched", "variant", ...}; see `report.Variant` for the parts.
    """
    from zerolab.ranks.watch import Watch

    for name, variant in job["variants"].items():
        tell({"event": "at", "variant": name, "doing": "watching"})
        watched = Watch(variant, rank, world, device)
        for _ in range(job["warmup"]):
            tell({"event": "beat"})
            watched.step()
        watched.holdings()
        tell({"event": "watched", "variant": name, **watched.finish(job["parts"])})


def call(job: dict, rank: int, world: int, device: str, tell) -> None:
    """Run the function named by job["call"] = "module:function" on every rank; tell what each rank returns."""
    module, _, name = job["call"].partition(":")
    value = getattr(importlib.import_module(module), name)(rank=rank, world=world, device=device, **job["arguments"])
    import torch

    values = [None] * world
    torch.distributed.all_gather_object(values, value)
    tell({"event": "returned", "values": values})


def plain(job: dict, rank: int, world: int, device: str, tell) -> None:
    """Run the function named by job["call"] in this process alone, without joining a group."""
    module, _, name = job["call"].partition(":")
    tell({"event": "returned", "values": [getattr(importlib.import_module(module), name)(**job["arguments"])]})


WORK = {"clock": clock, "watch": watch, "call": call, "plain": plain}


def explain(error: BaseException) -> dict:
    """What went wrong, in one line, and its kind: "out of memory", "rejected" or "failed"."""
    text = str(error).strip()
    kind = "failed"
    if type(error).__name__ == "ValidationError":
        kind = "rejected"
        text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
    elif type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text or isinstance(error, MemoryError):
        kind = "out of memory"
    elif type(error).__name__ == "DeepSpeedConfigError":
        kind = "rejected"
    line = text.splitlines()[0] if text else type(error).__name__
    if "can't allocate memory" in text:
        line = next(part for part in text.splitlines() if "can't allocate memory" in part)
    return {"kind": kind, "message": f"{type(error).__name__}: {line}"}


def work(rank: int, world: int, job: dict, store: str | None, tell) -> int:
    """Join, do the job, say "done". Any error is told by the rank that met it, with its traceback in the log."""
    try:
        device = "cpu" if job["work"] == "plain" else join(rank, world, job, store)
        if rank == 0:
            tell({"event": "joined"})
        WORK[job["work"]](job, rank, world, device, tell if rank == 0 else lambda message: None)
        tell({"event": "done", "rank": rank})
        return 0
    except BaseException as error:  # the leader must hear of everything, then end the group
        traceback.print_exc()
        sys.stderr.flush()
        tell({"event": "error", "rank": rank, **explain(error)})
        return 1


def forked(rank: int, world: int, job: dict, store: str, connection, log: str, leader: int) -> None:
    """Entry of a forked rank: its output goes to `log`, a Ctrl-C is the kernel's business, and it does not outlive the leader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.enable(file=2)
    stack = open(Path(log).with_name(f"stack.{os.getpid()}"), "w")  # open until the end: faulthandler writes there
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != leader:
            os._exit(1)
    share_cores(rank, world, job)
    status = work(rank, world, job, store, connection.send)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def launched(job_file: str, out_file: str) -> None:
    """Entry under a launcher: read the job, append rank 0's messages to `out_file` as JSON lines."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = json.load(open(job_file))
    with open(out_file, "a", buffering=1) if rank == 0 else open(os.devnull, "w") as out:
        status = work(rank, world, job, None, lambda message: out.write(json.dumps(message) + "\n"))
    drop_shared_buffers()
    sys.exit(status)


if __name__ == "__main__":
    launched(*[a for a in sys.argv[1:] if not a.startswith("--local_rank")])
