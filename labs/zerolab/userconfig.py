"""A reader's own ds_config, comments included, made into an experiment on this machine's ranks."""

from __future__ import annotations

from pathlib import Path

import hjson

from zerolab.experiment import Experiment, ZerolabError
from zerolab.model import shape

# What `zerolab run FILE` takes over from a config; other sections (optimizer, scheduler, logging) do not shape the schedule.
KEPT_SECTIONS = ("bf16", "fp16", "gradient_clipping", "communication_data_type")


def read(path: str | Path) -> dict:
    """The config in a file: JSON, or HJSON with comments, as DeepSpeed itself reads it.

    Raises ZerolabError that names the file and the place when it is neither.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ZerolabError(f"{path}: {error.strerror}") from None
    return parse(text, str(path))


def parse(text: str, name: str = "config") -> dict:
    """As `read`, from text."""
    try:
        config = hjson.loads(text)
    except hjson.HjsonDecodeError as error:
        raise ZerolabError(f"{name} is neither JSON nor HJSON: {error}") from None
    if not isinstance(config, dict):
        raise ZerolabError(f"{name} holds no JSON object; a ds_config begins with {{")
    return _plain(config)


def _plain(value):
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def resolve_auto(zero: dict, hidden: int) -> dict:
    """Replace "auto" as Hugging Face does: three keys follow from hidden_size, any other "auto" is dropped (DeepSpeed's default).

    Source: transformers, integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_finalize.
    """
    computed = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    return {k: computed.get(k) if v == "auto" else v for k, v in zero.items() if v != "auto" or k in computed}


def experiment(config: dict, name: str, against: dict | None = None, **changes) -> Experiment:
    """Compare a config with DeepSpeed's defaults (or `against`) on the model of its "zerolab" section.

    config["zerolab"]: {"model": {...}, "micro_batch", "seq", "accumulation", ...}: fields of Experiment; without it the model is
    Qwen2.5-14B with LoRA and checkpointing in the wind tunnel, at 1/32 of the width.
    """
    own = dict(config.get("zerolab", {}))
    model = own.pop("model", {"size": "qwen2.5-14b", "scale": 32, "lora": 1, "checkpointing": "non-reentrant"})
    zero = dict(config.get("zero_optimization", {}))
    if not zero:
        raise ZerolabError(f"{name}: no zero_optimization section; there is nothing to measure")
    scale = model.get("scale", 1)
    hidden = shape(**{k: v for k, v in model.items() if k not in ("lora", "checkpointing", "factory")})["hidden"] * scale
    zero = resolve_auto(zero, hidden)
    sections = {k: config[k] for k in KEPT_SECTIONS if k in config}
    fields = {
        "model": model,
        "micro_batch": number(config, "train_micro_batch_size_per_gpu", 1),
        "accumulation": number(config, "gradient_accumulation_steps", 1),
        "rounds": 3,
        "steps": 1,
        **own,
        **changes,
    }
    variants = {"defaults": {"zero_optimization": against or {}}, "yours": {"zero_optimization": zero, "ds_config": sections}}
    return Experiment(name, variants, **fields)


def number(config: dict, key: str, fallback: int) -> int:
    value = config.get(key, fallback)
    return fallback if value == "auto" else int(value)
