"""A model by name or by its Hugging Face config, as a ModuleTrace. Needs torch; transformers and peft for a config."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from zerolab.model import SIZES, shape

from . import family


def trace_of(model: str, lora: int = 0, checkpointing: str | None = None, micro_batch: int = 1, seq: int = 1024, linear: bool = True):
    """The ModuleTrace of a model in bf16.

    model: a name of `zerolab.model.SIZES`, or a config.json of transformers, or a folder that holds one. lora: rank of adapters on all
    linear layers. checkpointing: "reentrant" or "non-reentrant". Raises FileNotFoundError, ValueError for an unknown architecture.
    """
    if model not in SIZES:
        return from_config(config_file(model), lora, checkpointing, micro_batch, seq, linear)
    return _built_in({"size": model, "lora": lora, "checkpointing": checkpointing}, micro_batch, seq, linear)


def config_file(model: str) -> Path:
    """The config.json that a path or a folder means. Raises FileNotFoundError with what else it could be."""
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{model}: neither a config.json, nor a folder with one, nor one of {', '.join(SIZES)}")
    return path


def _built_in(model: dict, micro_batch: int, seq: int, linear: bool = True):
    from .specs import trace_of as captured

    return captured({"model": model, "micro_batch": micro_batch, "seq": seq, "accumulation": 1, "zero": {"memory_efficient_linear": linear}})


def shallow(size: str, lora: int, checkpointing: str | None, micro_batch: int, seq: int):
    """The trace of a built-in model with only as many layers as a family needs."""
    return _built_in({"size": size, "lora": lora, "checkpointing": checkpointing, "layers": family.SHALLOW}, micro_batch, seq)


def family_of(size: str, lora: bool, checkpointing: str | None) -> family.Family:
    """The family of a built-in model: all its batch sizes, sequence lengths and adapter ranks."""

    def capture(micro_batch, seq, rank):
        return shallow(size, rank, checkpointing, micro_batch, seq)

    return family.build(shape(size)["layers"], lora, capture)


@lru_cache(maxsize=8)  # a doctor asks for the same model a dozen times
def from_config(path: Path, lora: int, checkpointing: str | None, micro_batch: int, seq: int, linear: bool):
    """As `trace_of`, for a causal language model of transformers; adapters by peft, added after zero.Init as the Trainer does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from .capture import capture, numbered, outside

    config = AutoConfig.from_pretrained(path)
    config.use_cache = False
    with torch.device("meta"), numbered():
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if lora:
            from peft import LoraConfig, get_peft_model

            with outside():
                module = get_peft_model(module, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    if checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        if lora:
            module.enable_input_require_grads()
    module.train()
    ids = torch.zeros(micro_batch, seq, dtype=torch.long, device="meta")
    return capture(module, {"input_ids": ids, "labels": ids}, linear=linear)


def plans_json(jobs: list[dict]) -> list[dict]:
    """`plan_json` of each job; models that several share are captured once."""
    return [plan_json(**job) for job in jobs]


def plan_json(model: dict, ds_config: dict, world: int, machine: dict, gpu_memory: float | None, turns: bool = True, keep: bool = False) -> dict:
    """`plan()` of a model that is built here: what a rank process runs for the command line. model: arguments of `trace_of`."""
    from .config import arguments, resolve
    from .plan import plan
    from .time import Machine

    linear = bool(resolve(arguments(ds_config)["config"])["memory_efficient_linear"])
    return plan(trace_of(**model, linear=linear), ds_config, world, Machine(**machine), gpu_memory, turns, keep)


def without_each(job: dict) -> dict:
    """What each key of the job's zero_optimization does: the plan with it against the plan without.

    {"keys": {key: {"same", "time": ratio, "memory": bytes, "collectives": (with, without)}}}, or {"refused": [[key, why], …]} if
    DeepSpeed's own validation refuses the section.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    zero = job["ds_config"]["zero_optimization"]
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        return {"refused": [[".".join(map(str, e["loc"])), f"{e['msg']} (got {e['input']!r})"] for e in error.errors()]}
    whole, found = plan_json(**job), {}
    for key in zero:
        if key == "stage":
            continue
        rest = {k: v for k, v in zero.items() if k != key}
        without = plan_json(**{**job, "ds_config": {**job["ds_config"], "zero_optimization": rest}})
        time = whole["seconds"]["expected"] / without["seconds"]["expected"]
        more = whole["memory"]["peak"] - without["memory"]["peak"]
        same = whole["collectives"] == without["collectives"] and not more and abs(time - 1) < 1e-9
        counts = [sum(row[2] for row in p["collectives"]) for p in (whole, without)]
        found[key] = {"same": same, "time": time, "memory": more, "collectives": counts}
    return {"keys": found}
