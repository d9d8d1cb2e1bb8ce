"""This machine: which tier it offers, and the line under every figure that says where a measurement comes from."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

DEFAULT_WORLD = 4


@cache
def gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may use (CUDA_VISIBLE_DEVICES counts), without touching CUDA."""
    if not shutil.which("nvidia-smi") or os.environ.get("ZEROLAB_TIER") == "cpu":
        return ()
    listing = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    names = tuple(line.strip() for line in listing.splitlines() if line.strip())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([v for v in visible.split(",") if v.strip()])]


def world_size() -> int:
    """How many ranks an experiment gets: ZEROLAB_WORLD, else 4."""
    return int(os.environ.get("ZEROLAB_WORLD", DEFAULT_WORLD))


def tier(world: int) -> str:
    """ "gpu" (NCCL) when there is a GPU for every rank, else "cpu" (gloo). ZEROLAB_TIER=cpu forces the latter."""
    return "gpu" if len(gpus()) >= world else "cpu"


def threads(world: int) -> int:
    """CPU threads of each rank: ZEROLAB_THREADS, else this machine's cores shared out."""
    return int(os.environ.get("ZEROLAB_THREADS", max(1, cores() // world)))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return 0.0


@cache
def processor() -> str:
    """The processor's name, as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def link(world: int) -> str:
    """How the ranks talk: "gloo", "NVLink", "PCIe P2P", "shared memory (P2P off)", or "no link" for one card alone."""
    if tier(world) == "cpu":
        return "gloo"
    if world == 1:
        return "no link"
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "shared memory (P2P off)"
    row = next((r for r in _output(["nvidia-smi", "topo", "-m"]).splitlines() if r.strip().startswith("GPU0")), "")
    return "NVLink" if " NV" in row.replace("\t", " ") else "PCIe P2P"


def tier_line(world: int | None = None) -> str:
    """The first line of every lab: on which tier it runs."""
    world = world or world_size()
    if tier(world) == "gpu":
        return f"GPU tier: {world} ranks on {gpus()[0]}, NCCL over {link(world)}" if world > 1 else f"GPU tier: 1 rank on {gpus()[0]}"
    return f"CPU tier: {world} gloo ranks on {cores()} cores"


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "transformers", "peft", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str:
    """The commit of the course that measured, with "+" when its code had been changed since; "unknown" outside a checkout."""
    here = Path(__file__).parent
    short = _output(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"]).strip()
    changed = _output(["git", "-C", str(here), "status", "--porcelain", "--", str(here)]).strip()
    return os.environ.get("ZEROLAB_COMMIT") or (short + ("+" if changed else "") if short else "unknown")


def provenance(world: int, command: str | None = None) -> dict:
    """Where a record comes from: tier, devices, link, versions, commit, date (UTC), command."""
    return {
        "tier": tier(world),
        "world": world,
        "devices": list(gpus()[:world]) if tier(world) == "gpu" else [processor()],
        "link": link(world),
        "cores": cores(),
        "memory_gib": round(memory_gib(), 1),
        "threads": threads(world),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command or os.environ.get("ZEROLAB_COMMAND") or _program(),
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "notebook" if name.startswith("ipykernel") else name


def provenance_line(p: dict) -> str:
    """One line for under a figure."""
    where = f"{p['world']} × {p['devices'][0]}" if p["tier"] == "gpu" else f"{p['world']} gloo ranks on {p['cores']} cores"
    where += ", bf16 products in fp32" if p.get("bf16") == "fp32" else ""
    link = f", {p['link']}" if p["tier"] == "gpu" and p["world"] > 1 else ""
    v = p["versions"]
    return f"{where}{link} · DeepSpeed {v['deepspeed']}, torch {v['torch']} · {p['commit']} · {p['date']} · {p['command']}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def folder_name(world: int | None = None) -> str:
    """A folder for records of this machine, such as "h200-x2-nvlink", "h200-x1" or "cpu-x4"."""
    world = world or world_size()
    if tier(world) == "cpu":
        return f"cpu-x{world}"
    name = gpus()[0].lower().removeprefix("nvidia ").replace(" ", "-")
    short = {"NVLink": "-nvlink", "PCIe P2P": "-pcie", "shared memory (P2P off)": "-shm", "no link": ""}[link(world)]
    return f"{name}-x{world}{short}"
