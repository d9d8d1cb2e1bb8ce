"""The planner: what a reader can turn, where presets set it, and the plan that follows.

The book's page and the notebook's widget both show these controls. The page runs this very file, as JavaScript (book/_ext/pyjs.py),
so it keeps to that subset of Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerolab import knobs
from zerolab.model import SIZES
from zerolab.predict.family import Family
from zerolab.predict.plan import GIB, plan
from zerolab.predict.time import Machine
from zerolab.userconfig import resolve_auto

NUMBER = re.compile(r"^[0-9]+(\.[0-9]*)?([eE][+]?[0-9]+)?$")
CHECKPOINTING = ("none", "non-reentrant", "reentrant")
SIZE_KEYS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
)
OFFLOADS = ("offload_param", "offload_optimizer")
MODEL, CARDS, STEP, SIZE, SWITCH = "Model", "Cards and link", "Batch", "Sizes, in elements", "Switches"


@dataclass(frozen=True)
class Control:
    """key: its name among the values. kind: "choice", "number" (whole, unless `fraction`) or "switch". options: what a choice offers.

    low, high: of a number, both allowed. unit: said after the label.
    """

    key: str
    label: str
    group: str
    kind: str
    options: list[str]
    low: float = 0
    high: float = 0
    unit: str = ""
    fraction: bool = False


def controls(machines: list[str]) -> list[Control]:
    """All controls in the order in which a form shows them. machines: names of those whose rates are known."""
    found = [
        Control("model", "Model", MODEL, "choice", list(SIZES)),
        Control("lora", "LoRA rank", MODEL, "number", [], 0, 1024, "0 trains everything"),
        Control("checkpointing", "Gradient checkpointing", MODEL, "choice", list(CHECKPOINTING)),
        Control("world", "Cards", CARDS, "number", [], 1, 1024),
        Control("gpu_memory", "Memory of a card", CARDS, "number", [], 1, 4096, "GiB", True),
        Control("machine", "Rates measured on", CARDS, "choice", machines),
        Control("link", "Link", CARDS, "number", [], 0, 10000, "GB/s, 0 takes the measured one", True),
        Control("micro_batch", "Micro-batch of a card", STEP, "number", [], 1, 256, "sequences"),
        Control("seq", "Sequence length", STEP, "number", [], 128, 32768, "tokens"),
        Control("accumulation", "Gradient accumulation", STEP, "number", [], 1, 512, "micro-steps"),
    ]
    found += [Control(key, key, SIZE, "number", [], 1 if key == "reduce_bucket_size" else 0, 1e15) for key in SIZE_KEYS]
    found += [Control(key, key, SWITCH, "switch", []) for key in ("overlap_comm", "contiguous_gradients", *OFFLOADS)]
    return [*found, Control("pin_memory", "pin_memory of what is offloaded", SWITCH, "switch", [])]


# --- presets ---

AUTO = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
BOTH = {"offload_param": True, "offload_optimizer": True, "pin_memory": True}
NEVER = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "sub_group_size": 0}
# Templates that people share, where they differ from DeepSpeed's defaults. (repository and path; "auto" is Hugging Face's)
TEMPLATES = {
    "LLaMA-Factory examples/deepspeed/ds_z3_config.json": {**AUTO, "overlap_comm": False},
    "LLaMA-Factory examples/deepspeed/ds_z3_offload_config.json": {**AUTO, **BOTH, "overlap_comm": False},
    "ms-swift swift/llm/ds_config/zero3.json": AUTO,
    "ms-swift swift/llm/ds_config/zero3_offload.json": {**AUTO, "offload_param": True, "pin_memory": True},
    "axolotl deepspeed_configs/zero3_bf16.json": {**AUTO, **NEVER},
    "axolotl deepspeed_configs/zero3_bf16_cpuoffload_all.json": {**AUTO, **NEVER, **BOTH},
    "LLaVA scripts/zero3_offload.json": {**AUTO, **BOTH},
    "DeepSpeed docs/_tutorials/zero.md": {
        "reduce_bucket_size": 1e7,
        "stage3_prefetch_bucket_size": 1e7,
        "offload_param": True,
        "offload_optimizer": True,
    },
    "DeepSpeed-Chat ds_utils": {
        "stage3_prefetch_bucket_size": 3e7,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
    },
}
# The note's case. It names neither batch, sequence length nor link.
CASE = {"model": "qwen2.5-14b", "lora": 8, "checkpointing": "non-reentrant", "world": 4, "gpu_memory": 16}
SLOW = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
THE_NOTE = "The note"


def start(machine: str) -> dict:
    """Values before a reader turns anything: the note's case with the note's config."""
    rest = {"machine": machine, "link": 0, "micro_batch": 1, "seq": 1024, "accumulation": 1}
    return {**CASE, **rest, **presets(CASE["model"])[THE_NOTE]}


def presets(model: str) -> dict[str, dict]:
    """{name: values to set}: configs alone, except the note's, which come with its case. "auto" follows the model's width."""
    note = _settings(knobs.note_section())
    found = {
        THE_NOTE: {**CASE, **note},
        "The note's slow sizes": {**CASE, **note, **{key: int(2e7) for key in SLOW}},
        "DeepSpeed's defaults": _settings({}),
    }
    for name, changes in TEMPLATES.items():
        found[name] = {**_settings({}), **resolve_auto(changes, SIZES[model]["hidden"])}
    return {name: {key: int(value) if key in SIZE_KEYS else value for key, value in values.items()} for name, values in found.items()}


def _settings(zero: Mapping) -> dict:
    """A `zero_optimization` section as values of the controls, missing keys at DeepSpeed's defaults."""
    full = {**knobs.stage3_defaults(), **zero}
    sections = [{**default, **(full[key] or {})} for key, default in knobs.offload_defaults().items()]
    return {
        **{key: full[key] for key in SIZE_KEYS},
        "overlap_comm": full["overlap_comm"],
        "contiguous_gradients": full["contiguous_gradients"],
        **{key: bool(full[key]) for key in OFFLOADS},
        "pin_memory": all(section["pin_memory"] for section in sections),
    }


# --- from values to a plan ---


def checked(values: Mapping, machines: list[str]) -> dict:
    """Values as numbers and switches; numbers may come as text such as "5e8". Raises ValueError that names the control."""
    found = {}
    for control in controls(machines):
        value = values[control.key]
        if control.kind == "number":
            value = _number(control, str(value).strip())
        elif control.kind == "choice" and value not in control.options:
            raise ValueError(f"{control.label}: choose one of {', '.join(control.options)}")
        found[control.key] = value
    return found


def _number(control: Control, text: str) -> float:
    if not NUMBER.search(text):
        raise ValueError(f"{control.label}: {text or 'nothing'} is no number; write it as 500000000 or 5e8")
    value = float(text)
    if not control.fraction and value % 1:
        raise ValueError(f"{control.label}: {text} is not a whole number")
    if not control.low <= value <= control.high:
        raise ValueError(f"{control.label}: {text} is not between {control.low:.16g} and {control.high:.16g}")
    return value if control.fraction else int(value)


def ds_config(values: Mapping) -> dict:
    """The ds_config that the (checked) values stand for."""
    zero = {"stage": 3, "overlap_comm": values["overlap_comm"], "contiguous_gradients": values["contiguous_gradients"]}
    for key in SIZE_KEYS:
        zero[key] = values[key]
    for key in OFFLOADS:
        zero[key] = {"device": "cpu", "pin_memory": values["pin_memory"]} if values[key] else None
    return {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": values["micro_batch"],
        "gradient_accumulation_steps": values["accumulation"],
        "zero_optimization": zero,
    }


def family_name(model: str, lora: bool, checkpointing: str) -> str:
    return f"{model}-{'lora' if lora else 'full'}-{checkpointing}"


class Planner:
    """Plans for values of the controls. machines: {name: a `Machine` as a dict}.

    A model's family must be told before its first plan: `needs` names it, `learn` takes it.
    """

    def __init__(self, machines: dict[str, dict]):
        self.machines = {name: Machine(**rates) for name, rates in machines.items()}
        self.families: dict[str, Family] = {}
        self.traced = None  # what the last trace was made for
        self.trace = None

    def needs(self, values: Mapping) -> str:
        """The family that a plan of these values needs. Raises ValueError for values that are none."""
        v = checked(values, list(self.machines))
        return family_name(v["model"], v["lora"] > 0, v["checkpointing"])

    def learn(self, name: str, family: str) -> None:
        """family: `Family.to_json`."""
        self.families[name] = Family.from_json(family)

    def plan(self, values: Mapping, turns: bool = False) -> dict:
        """`predict.plan.plan` of these values, with their ds_config. Raises ValueError; Unpredictable, which is one, says what and why."""
        v = checked(values, list(self.machines))
        name = family_name(v["model"], v["lora"] > 0, v["checkpointing"])
        wanted = [name, v["micro_batch"], v["seq"], v["lora"]]
        if wanted != self.traced:
            self.trace = self.families[name].trace(v["micro_batch"], v["seq"], v["lora"])
            self.traced = wanted
        machine = self.machines[v["machine"]]
        if v["link"]:
            machine = replace(machine, name=f"{machine.name}, link {v['link']:.6g} GB/s", bandwidth=v["link"] * 1e9)
        config = ds_config(v)
        return {**plan(self.trace, config, v["world"], machine, v["gpu_memory"] * GIB, turns), "ds_config": config}
