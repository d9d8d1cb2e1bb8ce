"""`zerolab plan`: from the command line's words to `predict.plan`, which runs where torch is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from zerolab import report, userconfig
from zerolab.experiment import ZerolabError, call
from zerolab.model import SIZES
from zerolab.predict.models import config_file
from zerolab.predict.plan import describe
from zerolab.predict.time import Machine
from zerolab.progress import Progress

__all__ = ["describe", "machines", "plan", "plans", "rates_of"]

LINKS = {"nvlink": "h200-x2-nvlink", "pcie-shm": "h200-x2-shm", "gloo": "cpu-x4"}
UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def rates_of(name: str) -> Machine:
    """A machine's rates by the name of a link, of a folder in labs/results, or from a file. Raises ZerolabError."""
    path = Path(name) if name.endswith(".json") else report.results_folder(LINKS.get(name, name)) / "machine.json"
    try:
        return Machine.load(path)
    except OSError:
        raise ZerolabError(f"no rates of {name!r}; there are {', '.join(machines())}, and `zerolab calibrate` measures yours") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ZerolabError(f"{path} holds no machine's rates: {error}") from None


def machines() -> dict[str, dict]:
    """{name: rates} of every recorded machine; first those that talk as the note's cards do, through shared memory."""
    names = [name for name in report.recorded_machines() if (report.RESULTS / name / "machine.json").exists()]
    return {name: rates_of(name).to_json() for name in sorted(names, key=lambda name: (name.startswith("cpu"), "shm" not in name, name))}


def size(text: str) -> float:
    """Bytes in "16GiB", "24 GB" or "80e9". Raises ZerolabError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]i?b)?\s*", text, re.IGNORECASE)
    if not match:
        raise ZerolabError(f"{text!r} is no size; write 16GiB or 24GB")
    return float(match[1]) * UNITS[(match[2] or "").lower()]


def hidden_size(model: str) -> int:
    """Of a built-in model or a config.json. Raises ZerolabError."""
    if model in SIZES:
        return SIZES[model]["hidden"]
    try:
        path = config_file(model)
        config = json.loads(path.read_text())
    except OSError as error:
        raise ZerolabError(str(error)) from None
    except ValueError as error:
        raise ZerolabError(f"{path} is not JSON: {error}") from None
    found = config.get("hidden_size") or (config.get("text_config") or {}).get("hidden_size")
    if not found:
        raise ZerolabError(f'{path} has no hidden_size: write numbers in place of "auto"')
    return found


def resolved(config: dict, model: str, launcher: str, micro_batch: int | None, accumulation: int | None) -> dict:
    """A ds_config with every "auto" replaced as Hugging Face's Trainer does it for bf16. Raises ZerolabError where nobody can.

    Blocks that people share seldom say the precision: without a bf16 and fp16 section this takes bf16 (DeepSpeed itself, fp32).
    """
    zero = dict(config.get("zero_optimization") or {})
    if zero.get("stage", 3) != 3:
        raise ZerolabError(f"zero_optimization.stage is {zero['stage']}; this plans stage 3")
    if launcher == "deepspeed" and (auto := _autos(config)):
        raise ZerolabError(f'{", ".join(auto)}: "auto" is Hugging Face\'s; DeepSpeed alone refuses it. Write numbers, or use --launcher hf')
    if "auto" in zero.values():
        zero = userconfig.resolve_auto(zero, hidden_size(model))
    found = {**config, "zero_optimization": {"stage": 3, **zero}}
    halves = [found.get(kind) or {} for kind in ("bf16", "fp16")]
    if not any(halves) or any(half.get("enabled") == "auto" for half in halves):
        found = {**found, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    for key, value in (("train_micro_batch_size_per_gpu", micro_batch), ("gradient_accumulation_steps", accumulation)):
        found[key] = value or userconfig.number(found, key, 1)
    return found


def _autos(config: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if value == "auto":
            found.append(prefix + key)
        elif isinstance(value, dict):
            found += _autos(value, f"{prefix}{key}.")
    return found


def plan(**asked) -> dict:
    """One plan, see `plans`."""
    return plans({"plan": asked})["plan"]


def plans(asked: dict[str, dict], progress: bool = True) -> dict[str, dict]:
    """{label: plan} (see `predict.plan`) for {label: what is asked}, with these words, all of them optional:

    model, config (a ds_config; {} means DeepSpeed's stage-3 defaults in bf16), world, lora, checkpointing, micro_batch, seq, accumulation,
    machine, link (a name, or bytes/s of bus bandwidth), gpu_memory (bytes), launcher, turns, keep (the lanes' intervals). Raises ZerolabError with what to change.
    """
    jobs = [job(**words) for words in asked.values()]
    bar = Progress(1, "planning: importing torch, building the model without weights", show=progress)
    try:
        work = {"work": "plain", "call": "zerolab.predict.models:plans_json", "arguments": {"jobs": jobs}, "threads": 1}
        return dict(zip(asked, call(work, world=1)[0]))
    finally:
        bar.close()


def job(
    model: str = "qwen2.5-14b",
    config: dict | None = None,
    world: int = 4,
    lora: int = 0,
    checkpointing: str | None = None,
    micro_batch: int | None = None,
    seq: int = 1024,
    accumulation: int | None = None,
    machine: str = "h200-x2-nvlink",
    link: str | float | None = None,
    gpu_memory: float | None = None,
    launcher: str = "hf",
    turns: bool = True,
    keep: bool = False,
) -> dict:
    """The arguments of `predict.models.plan_json` for the words of `plans`. Raises ZerolabError."""
    config = resolved(config or {}, model, launcher, micro_batch, accumulation)
    rates = rates_of(machine)
    if isinstance(link, str):
        rates = rates.linked(rates_of(link))
    elif link:
        rates = replace(rates, name=f"{rates.name}, link {link / 1e9:g} GB/s", bandwidth=link)
    what = {"model": model, "lora": lora, "checkpointing": checkpointing, "micro_batch": config["train_micro_batch_size_per_gpu"], "seq": seq}
    return {"model": what, "ds_config": config, "world": world, "machine": rates.to_json(), "gpu_memory": gpu_memory, "turns": turns, "keep": keep}
