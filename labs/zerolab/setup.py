"""`zerolab setup`: is this machine fit, and if not, what to do. Compiles DeepSpeed's two extensions once, then runs four ranks."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import time

from zerolab import machine, ranks
from zerolab.experiment import Experiment, accelerator
from zerolab.progress import Progress
from zerolab.ranks import RanksError

NEED_MEMORY_GIB = 6  # four ranks with torch and DeepSpeed imported, and a notebook beside them


def checks() -> list[tuple[str, bool, str]]:
    """(what, fine?, what was found or what to do) for everything that needs no ranks."""
    system = platform.system()
    found = [
        (
            "operating system",
            system in ("Linux", "Darwin"),
            system if system in ("Linux", "Darwin") else f"{system} cannot fork ranks; on Windows use WSL 2",
        ),
        (
            "Python",
            sys.version_info >= (3, 11),
            platform.python_version() if sys.version_info >= (3, 11) else "needs Python 3.11 or newer",
        ),
    ]
    memory = machine.memory_gib()
    fits = memory == 0 or memory >= NEED_MEMORY_GIB
    advice = "" if fits else f"; {NEED_MEMORY_GIB} GiB are needed: close programs, or set ZEROLAB_WORLD=2"
    found.append(("memory", fits, f"{memory:.1f} GiB{advice}"))
    for package in ("torch", "deepspeed"):
        there = importlib.util.find_spec(package) is not None
        version = machine.versions().get(package, "")
        found.append((package, there, version if there else "not installed: run `make book` or `pip install -r requirements.txt`"))
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    advice = "none on PATH: `apt-get install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora), `xcode-select --install` (macOS)"
    found.append(("C++ compiler", bool(compiler), compiler or advice))
    return found


def compile_cpu_adam() -> bool:
    """Let the leader compile and load the optimizer of offloaded runs, with a bar; says how it went."""
    begin = time.perf_counter()
    bar = Progress(1, "compiling DeepSpeed's CPU Adam (about a minute, the first time only)")
    offloaded = Experiment("setup", {"offloaded": {"offload_optimizer": {"device": "cpu"}}}, rounds=0)
    try:
        seconds = offloaded.run_with("zerolab.ranks.offload:adam", save=False, elements=1000, rounds=1)["offloaded"].seconds()
    except RanksError as error:
        print(f"  NO  DeepSpeed's CPU Adam: {error}\n{error.log}")
        return False
    finally:
        bar.close()
    print(f"  ok  DeepSpeed's CPU Adam loaded in {time.perf_counter() - begin:.1f} s")
    return seconds > 0


def main() -> int:
    print(machine.tier_line())
    bad = 0
    for what, fine, text in checks():
        print(f"  {'ok ' if fine else 'NO '} {what}: {text}")
        bad += not fine
    if bad:
        print("zerolab setup: mend what is marked NO, then run it again")
        return 1
    begin = time.perf_counter()
    bar = Progress(1, "compiling and loading DeepSpeed's extension (about half a minute, the first time only)")
    try:
        facts = ranks.leader(accelerator(machine.world_size())).ready()
    except RanksError as error:
        print(f"  NO  leader of the ranks: {error}")
        return 1
    finally:
        bar.close()
    print(f"  ok  torch {facts['torch']} and DeepSpeed {facts['deepspeed']} loaded in {time.perf_counter() - begin:.1f} s")
    if not compile_cpu_adam():
        return 1
    begin = time.perf_counter()
    report = Experiment("setup", {"smoke": {}}, rounds=0, watch=(), model={"size": "tiny", "layers": 1}).run(save=False)
    smoke = report["smoke"]
    if not smoke.ok:
        print(f"  NO  {machine.world_size()} ranks: {smoke.status}: {smoke.message}\n{smoke.log}")
        return 1
    print(f"  ok  {machine.world_size()} ranks trained {len(smoke.data['collectives'])} steps in {time.perf_counter() - begin:.1f} s")
    return 0
