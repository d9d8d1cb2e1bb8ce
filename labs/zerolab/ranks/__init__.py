"""Starting, feeding and ending the ranks, from a process that imports neither torch nor DeepSpeed.

One leader process per tier stays alive as long as the kernel does; each `run` forks a fresh group of ranks from it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection


class RanksError(RuntimeError):
    """A group of ranks ended badly. kind: "out of memory", "rejected", "failed", "died", "hung"; variant: at which."""

    def __init__(self, kind: str, message: str, variant: str | None = None, log: str = ""):
        super().__init__(message)
        self.kind, self.variant, self.log = kind, variant, log


class Leader:
    """The kernel's end of a leader process. accelerator: "cpu" or "cuda" (DS_ACCELERATOR of all its ranks)."""

    def __init__(self, accelerator: str):
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "DS_ACCELERATOR": accelerator,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() without a CUDA context
            "DEEPSPEED_LOG_LEVEL": "error",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        # One thread as the default would make a CPU-side Adam look like a hang; the ranks choose their own number.
        environment.pop("OMP_NUM_THREADS", None)
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zerolab.ranks.leader", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            start_new_session=True,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.facts: dict | None = None

    def alive(self) -> bool:
        return self.process.poll() is None

    def ready(self) -> dict:
        """Wait for the imports; the leader's facts. Raises RanksError with its last words when it cannot start."""
        if self.facts is None:
            message = self._receive()
            if message["event"] != "ready":
                raise RanksError("failed", f"the leader cannot start: {message['message']}")
            self.facts = message
        return self.facts

    def _receive(self) -> dict:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.errors.seek(0)
            words = self.errors.read()[-2000:].decode(errors="replace").strip()
            self.kill()
            raise RanksError("died", "the leader of the ranks died" + (f": {words.splitlines()[-1]}" if words else "")) from None

    def run(self, world: int, job: dict) -> Iterator[dict]:
        """Yield the messages of one group. Whatever stops the iteration early (an error, Ctrl-C) ends the group's processes."""
        self.ready()
        finished = False
        try:
            self.connection.send({"world": world, "job": job})
            while (message := self._receive())["event"] != "over":
                yield message
            finished = True
        finally:
            if not finished:
                self.stop()

    def stop(self, patience=5.0):
        """End the group that is running; the leader stays. If it does not answer within `patience` seconds, end it too."""
        try:
            self.connection.send("stop")
            while self.connection.poll(patience):
                if self.connection.recv()["event"] == "over":
                    return
        except (OSError, EOFError):
            pass
        self.kill()

    def kill(self):
        """End the leader and every rank of it, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            self.process.wait(10)
        with contextlib.suppress(Exception):
            self.connection.close()
        with contextlib.suppress(Exception):
            self.errors.close()


_leaders: dict[str, Leader] = {}


def leader(accelerator: str) -> Leader:
    """The living leader for this accelerator, started when there is none."""
    if accelerator not in _leaders or not _leaders[accelerator].alive():
        _leaders[accelerator] = Leader(accelerator)
    return _leaders[accelerator]


@atexit.register
def shutdown():
    """End every leader (and so every rank) of this process."""
    while _leaders:
        _leaders.popitem()[1].kill()
