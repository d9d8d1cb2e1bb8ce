"""The process that imports torch and DeepSpeed once, and forks groups of ranks from then on.

Started by the kernel side (`zerolab.ranks`) with one end of a socket pair; leads its own process group, so that one signal ends
everything. It never touches a GPU itself: a CUDA context would not survive the fork.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import connection as mpc
from pathlib import Path

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


def prepare() -> dict:
    """Import everything, load DeepSpeed's CPU extension, and say what this machine runs: versions, device names."""
    import importlib
    import logging

    for name in PRELOAD:
        importlib.import_module(name)
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    devices = []
    if os.environ.get("DS_ACCELERATOR") == "cuda":
        assert not torch.cuda.is_initialized(), "CUDA was touched before the fork"
    else:
        from deepspeed.comm.torch import build_shm_op

        build_shm_op()  # compiled once, loaded here, inherited by every fork
    return {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "devices": devices}


def tail(log: Path, size=6000) -> str:
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-size:].decode(errors="replace")
        noise = ("built successfully", "USDT:", "CPUAllocator.cpp", "[W", "UserWarning", "warnings.warn")
        return "\n".join(line for line in text.splitlines() if not any(n in line for n in noise))[-4000:]
    return ""


class Group:
    """`world` forked ranks at one job, until all are done, one fails, one dies, or none has spoken for `limit` seconds."""

    def __init__(self, world: int, job: dict):
        self.folder = Path(tempfile.mkdtemp(prefix="zerolab-"))
        self.log = self.folder / "log"
        self.limit = job["limit"]
        context = multiprocessing.get_context("fork")
        self.ranks, self.pipes = [], []
        from zerolab.ranks import rank as entry

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
                        time.sleep(0.2)  # let the others' words reach the log
                        yield {**message, "log": tail(self.log)}
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
                for process in self.ranks:
                    os.kill(process.pid, signal.SIGUSR1)  # every rank writes where it stands
                time.sleep(0.5)
                yield {"event": "hung", "seconds": self.limit, "log": tail(self.log)}
                return

    def end(self):
        for process in self.ranks:
            if process.is_alive():
                process.kill()
        for process in self.ranks:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        for file in self.folder.iterdir():
            file.unlink(missing_ok=True)
        self.folder.rmdir()


def main(handle: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
