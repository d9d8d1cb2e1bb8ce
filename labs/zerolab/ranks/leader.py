"""The process that imports torch and DeepSpeed once, and forks groups of ranks from then on.

Started by the kernel side (`zerolab.ranks`) with one end of a socket pair; leads its own process group, so that one signal ends
everything. It never touches a GPU itself: a CUDA context would not survive the fork.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from multiprocessing import connection as mpc
from pathlib import Path

from zerolab.ranks import bf16
from zerolab.ranks import rank as entry

# Most of the time that DeepSpeed takes to set up an engine goes into these lazy imports.
PRELOAD = (
    "torch",
    "deepspeed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.profiler",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.partitioned_param_coordinator",
)

# What the others say when one rank is gone.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error", "ncclRemoteError")


def prepare() -> dict:
    """Import everything, load DeepSpeed's CPU extension, and say what this machine runs: versions, device names, how
    bf16 matrices are multiplied ("native", or "fp32": see `bf16`)."""
    import logging

    for name in PRELOAD:
        importlib.import_module(name)
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    devices, products = [], "native"
    if os.environ.get("DS_ACCELERATOR") == "cuda":
        assert not torch.cuda.is_initialized(), "CUDA was touched before the fork"
    else:
        from deepspeed.comm.torch import build_shm_op

        forget_dead_build("deepspeed_shm_comm")
        build_shm_op()  # compiled once, loaded here, inherited by every fork
        products = "fp32" if bf16.wanted() else products
    return {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "devices": devices, "bf16": products}


def wants_cpu_adam(job: dict) -> str | None:
    """The first variant of a job whose optimizer lives on the host, None when none does."""
    variants = job.get("variants") or job.get("arguments", {}).get("variants") or {}
    for name, variant in variants.items():
        if (variant.get("zero", {}).get("offload_optimizer") or {}).get("device", "none") != "none":
            return name
    return None


def load_cpu_adam() -> None:
    """Compile (once on a machine) and load DeepSpeed's CPU Adam, so that no rank does; every fork inherits it.

    Needs a C++ compiler; touches no GPU. Raises what the compiler's caller raises.
    """
    import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # the processor stays; each look starts three programs
    forget_dead_build("cpu_adam")
    CPUAdamBuilder().load(verbose=False)
    cpuinfo.get_cpu_info()


def import_once(job: dict) -> None:
    """Import here what a job calls, so that its libraries are paid for once and not by every rank."""
    name = job.get("call", "").partition(":")[0]
    if job["work"] == "call" and name not in sys.modules:
        with contextlib.suppress(Exception):  # the ranks meet the same error, and tell it
            importlib.import_module(name)
            gc.collect()
            gc.freeze()


def forget_dead_build(name: str) -> None:
    """torch waits for ever for the lock of a build that was killed: remove it when no process has it open."""
    import psutil
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False)) / "lock"
    if not lock.exists():
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(lock) for file in process.open_files()):
                return
    lock.unlink(missing_ok=True)


def tail(log: Path, size=6000) -> str:
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-size:].decode(errors="replace")
        # A saved log names files of the course and of packages, not folders of one machine.
        text = re.sub(r'"/[^"\n]*?/(labs/zerolab|site-packages)/', r'"\1/', text)
        noise = ("built successfully", "USDT:", "CPUAllocator.cpp", "[W", "UserWarning", "warnings.warn")
        return "\n".join(line for line in text.splitlines() if not any(n in line for n in noise))[-4000:]
    return ""


def stacks(folder: Path, pids: list[int], frames=6, patience=10.0) -> str:
    """Ask each rank where it stands; the innermost frames of each main thread.

    faulthandler writes to the rank's own file (`rank.forked`): in one file the ranks would write into each other's lines.
    A file that has stopped growing is complete; a rank that writes nothing for `patience` seconds is left out.
    """
    kept = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        file, size, until = folder / f"stack.{pid}", 0, time.monotonic() + patience
        while time.monotonic() < until:
            time.sleep(0.2)
            before, size = size, file.stat().st_size if file.exists() else 0
            if before == size > 0:
                break
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        kept += lines[start : start + 1 + frames]
    return "\n".join(kept)


class Group:
    """`world` forked ranks at one job, until all are done, one fails, one dies, or none has spoken for `limit` seconds."""

    def __init__(self, world: int, job: dict):
        self.folder = Path(tempfile.mkdtemp(prefix="zerolab-"))
        self.log = self.folder / "log"
        self.limit = job["limit"]
        context = multiprocessing.get_context("fork")
        self.ranks, self.pipes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            arguments = (rank, world, job, str(self.folder / "store"), theirs, str(self.log), os.getpid())
            process = context.Process(target=entry.forked, args=arguments)
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(mine)

    def messages(self, kernel):
        """Yield what the ranks say, then one last message: "finished", "error", "died" or "hung". The kernel's "stop" ends it."""
        open_pipes, done, heard = dict(enumerate(self.pipes)), set(), time.monotonic()
        while True:
            sentinels = {self.ranks[r].sentinel: r for r in range(len(self.ranks)) if r not in done}
            ready = mpc.wait([kernel, *open_pipes.values(), *sentinels], timeout=1.0)
            if kernel in ready:
                kernel.recv()  # EOFError (the kernel is gone) and "stop" both end here
                return
            for rank, pipe in list(open_pipes.items()):
                while pipe in ready and pipe.poll():
                    try:
                        message = pipe.recv()
                    except EOFError:
                        del open_pipes[rank]
                        break
                    heard = time.monotonic()
                    if message["event"] == "error":
                        yield self.blame(message, open_pipes, done)
                        return
                    if message["event"] == "done":
                        done.add(message["rank"])
                    else:
                        yield message
            if len(done) == len(self.ranks):
                yield {"event": "finished"}
                return
            for rank, process in enumerate(self.ranks):
                if rank not in done and not process.is_alive() and not self.pipes[rank].poll():
                    yield {"event": "died", "rank": rank, "exitcode": process.exitcode, "log": tail(self.log)}
                    return
            if time.monotonic() - heard > self.limit:
                where = stacks(self.folder, [process.pid for process in self.ranks])
                yield {"event": "hung", "seconds": self.limit, "log": where or tail(self.log)}
                return

    def blame(self, first: dict, open_pipes: dict, done: set) -> dict:
        """The message that names the cause: when one rank goes, the others lose their connections to it and say so too."""
        time.sleep(0.5)  # let the others' words arrive
        errors, spoke = [first], {first["rank"], *done}
        for rank, pipe in open_pipes.items():
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    message = pipe.recv()
                    spoke.add(rank)
                    if message["event"] == "error":
                        errors.append(message)
        causes = [e for e in errors if not any(words in e["message"] for words in ECHOES)]
        if causes:
            return {**causes[0], "log": tail(self.log)}
        for rank, process in enumerate(self.ranks):
            if rank not in spoke and not process.is_alive():
                return {"event": "died", "rank": rank, "exitcode": process.exitcode, "log": tail(self.log)}
        return {**first, "log": tail(self.log)}

    def end(self):
        for process in self.ranks:
            if process.is_alive():
                process.kill()
        for process in self.ranks:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        entry.drop_shared_buffers()
        for file in self.folder.iterdir():
            file.unlink(missing_ok=True)
        self.folder.rmdir()


def main(handle: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["MASTER_PORT"] = str(os.getpid())  # nobody listens there: it names this leader's files in shared memory
    kernel = mpc.Connection(handle)
    begin = time.perf_counter()
    try:
        facts = prepare()
    except Exception as error:
        kernel.send({"event": "unusable", "message": f"{type(error).__name__}: {error}"})
        return
    # DeepSpeed collects garbage while it builds an engine. Frozen, what was imported is neither scanned nor copied in every fork.
    gc.collect()
    gc.freeze()
    kernel.send({"event": "ready", "seconds": time.perf_counter() - begin, **facts})
    while True:
        request = kernel.recv()
        if request == "stop":
            continue
        if variant := wants_cpu_adam(request["job"]):
            kernel.send({"event": "at", "variant": variant, "doing": "loading DeepSpeed's CPU Adam (the first time compiles it)"})
            try:
                load_cpu_adam()
            except Exception as error:
                text = f"DeepSpeed's CPU Adam cannot be compiled (a C++ compiler is needed): {type(error).__name__}: {error}"
                kernel.send({"event": "error", "kind": "failed", "message": text.splitlines()[0], "log": str(error)[-4000:]})
                kernel.send({"event": "over"})
                continue
        import_once(request["job"])
        group = Group(request["world"], request["job"])
        try:
            kernel.send({"event": "forked", "pids": [p.pid for p in group.ranks]})
            for message in group.messages(kernel):
                kernel.send(message)
        finally:
            group.end()
            kernel.send({"event": "over"})


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the kernel is gone: so are we
    os.killpg(0, signal.SIGKILL)
