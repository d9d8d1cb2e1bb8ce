"""What one forward and backward of a model looks like from DeepSpeed's hooks: plain data, no torch.

`zerolab.predict.capture` makes a `ModuleTrace`, `zerolab.predict.schedule` reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import NamedTuple

# Kinds of event. Each event is [kind, index] (an index of a module or of a parameter) or [ACCESS, module, parameter].
PRE_FORWARD = "F"  # module: its parameters are needed now
RECOMPUTE = "R"  # module: the same, but while a backward runs (gradient checkpointing computes it again)
POST_FORWARD = "f"  # module: done
PRE_BACKWARD = "B"  # module
POST_BACKWARD = "b"  # module
GRADIENT = "G"  # parameter: its gradient has been accumulated
LINEAR = "L"  # parameter: the backward of a linear function reads this weight
ACCESS = "X"  # module, parameter: code inside the module reads a parameter that no running module owns


class Parameter(NamedTuple):
    """name: of its first owner. elements: of the whole tensor. trainable: has a gradient and an optimizer state.

    dtype: "fp32", "bf16" or "fp16" if it keeps its own; None if it takes the config's. What is born under zero.Init takes the
    config's; what is added to such a model later (peft's adapters) keeps its own, since DeepSpeed casts no model that zero.Init made.
    """

    name: str
    elements: int
    trainable: bool
    dtype: str | None = None


class Module(NamedTuple):
    """name: dotted path ("" for the root). cls: qualified class name. parameters: its own, children's not included."""

    name: str
    cls: str
    parameters: list[int]


@dataclass
class ModuleTrace:
    """One micro-step of a model.

    parameters: in the order of DeepSpeed's `ds_id`; everything else refers to them by index.
    order: parameter indices as `named_parameters()` yields them (decides what persists, and the optimizer's sub-groups).
    modules: every module that DeepSpeed hangs hooks on.
    forward, backward: events, see the kinds above.
    linear: whether `memory_efficient_linear` (DeepSpeed's own linear function) was in place, as it is by default.
    refused: what the model does that a prediction cannot follow, empty if nothing.
    forward_spans, backward_spans: what the model computes and keeps before the first event, between each two, and after the last;
    see `meter.Meter` for the five numbers of a span.
    """

    parameters: list[Parameter]
    order: list[int]
    modules: list[Module]
    forward: list[list]
    backward: list[list]
    linear: bool = True
    refused: list[str] = field(default_factory=list)
    forward_spans: list[list[int]] = field(default_factory=list)
    backward_spans: list[list[int]] = field(default_factory=list)

    @cached_property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)

    @cached_property
    def trainable_elements(self) -> int:
        return sum(p.elements for p in self.parameters if p.trainable)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModuleTrace:
        data = json.loads(text)
        data["parameters"] = [Parameter(*p) for p in data["parameters"]]
        data["modules"] = [Module(*m) for m in data["modules"]]
        return cls(**data)
