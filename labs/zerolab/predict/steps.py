"""What a schedule is: the collectives of each step, and what was resident, full and busy meanwhile.

`predict/schedule.py` makes them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from zerolab.trace import PHASES, Collective

# Why a collective was issued. Gathers: on demand, ahead, for code that reads a parameter outside its module, for one product in a
# linear layer's backward, after the optimizer. Then: gradients, their norm, fp16's overflow flag, ranks comparing lists.
FETCH, PREFETCH, ACCESS, LINEAR, PERSIST = "fetch", "prefetch", "access", "linear", "persist"
REDUCE, NORM, OVERFLOW, CHECK = "reduce", "norm", "overflow", "check"
NOTHING = ""  # a gather that needs no collective


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    collectives: in the order in which the engine issues them. why: for each, one of the words above.
    params: for each, the indices of the parameters in it (empty for norms and checks).
    resident: for each micro-step, elements gathered (or being gathered) after each event of forward and backward.
    kept: for each micro-step, elements still gathered when its forward ends, without the persistent ones.
    persistent: elements of persistent parameters.
    peaks (of the last step): {phase: bytes on the device beyond what is there between steps, at that phase's fullest moment: [gathered parameters,
    activations, gradients on their way]}. Activations are known if the trace has spans.
    seconds: {phase: s}; busy: {lane: s}; lanes: {lane: [[start, end], ...]}: of the last step, if a machine was given.
    """

    collectives: list[Collective]
    why: list[str]
    params: list[list[int]]
    resident: list[list[int]]
    kept: list[int]
    persistent: int
    peaks: dict[str, list[int]]
    seconds: dict[str, float]
    busy: dict[str, float]
    lanes: dict[str, list[list[float]]]

    @property
    def peak_resident(self) -> int:
        """Most elements gathered at one time, persistent ones included."""
        return max(max(series, default=0) for series in self.resident)

    @property
    def kept_to_backward(self) -> int:
        return max(self.kept)

    def select(
        self, op: str | None = None, phase: str | None = None, why: str | None = None, micro: int | None = None
    ) -> list[Collective]:
        """The collectives that match; None matches any."""
        return [
            c
            for c, w in zip(self.collectives, self.why)
            if op in (None, c.op) and phase in (None, c.phase) and why in (None, w) and micro in (None, c.micro)
        ]

    def count(self, **which) -> int:
        return len(self.select(**which))

    def elements(self, **which) -> int:
        return sum(c.elements for c in self.select(**which))

    def bytes(self, **which) -> int:
        return sum(c.bytes for c in self.select(**which))

    def reasons(self) -> dict[str, tuple[int, int]]:
        """{why: (collectives, elements)}: gathers on demand ("fetch") against prefetched ones, and so on."""
        count: Counter = Counter(self.why)
        size: Counter = Counter()
        for c, w in zip(self.collectives, self.why):
            size[w] += c.elements
        return {w: (count[w], size[w]) for w in count}

    def table(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """{(op, phase): (count, elements, bytes)}, phases in order."""
        found: dict[tuple[str, str], tuple[int, int, int]] = {}
        for c in self.collectives:
            n, e, b = found.get((c.op, c.phase), (0, 0, 0))
            found[c.op, c.phase] = n + 1, e + c.elements, b + c.bytes
        return dict(sorted(found.items(), key=lambda item: (PHASES.index(item[0][1]), item[0][0])))


@dataclass(frozen=True)
class Schedule:
    """What a model and a config cause in the first steps. The first records a trace, the last is steady (`settled` says so).

    names: of the parameters, for `Step.params`. elements: of the whole model. world, accumulation: as given.
    tiles: elements of each optimizer sub-group on one rank.
    """

    steps: list[Step]
    names: list[str]
    elements: int
    world: int
    accumulation: int
    tiles: list[int]

    @property
    def sub_groups(self) -> int:
        return len(self.tiles)

    @property
    def steady(self) -> Step:
        return self.steps[-1]

    @property
    def settled(self) -> bool:
        """Whether the last two steps are the same, as they are from the second or third on."""
        return len(self.steps) > 1 and self.steps[-1].collectives == self.steps[-2].collectives

    @property
    def passes(self) -> float:
        """Elements gathered in forward and backward of a steady micro-step, over the model's (padding counts)."""
        gathered = sum(
            self.steady.elements(phase=phase, why=why) for phase in PHASES[:2] for why in (FETCH, PREFETCH, ACCESS, LINEAR)
        )
        return gathered / self.accumulation / self.elements

    def parameters_of(self, step: int, index: int) -> list[str]:
        """Names of the parameters in one collective."""
        return [self.names[p] for p in self.steps[step].params[index]]

    def describe(self, step: int = -1, first: int = 10) -> str:
        """The first collectives of a step, one a line, for a reader."""
        lines = []
        chosen = self.steps[step]
        for c, why, params in list(zip(chosen.collectives, chosen.why, chosen.params))[:first]:
            names = ", ".join(self.names[p] for p in params[:3]) + (f" and {len(params) - 3} more" if len(params) > 3 else "")
            lines.append(f"{c.phase:8} {c.op:14} {c.elements:>14,} elements  {why:8} {names}")
        return "\n".join(lines)

    def to_json(self) -> str:
        steps = [{**vars(s), "collectives": [list(c.key) for c in s.collectives]} for s in self.steps]
        return json.dumps({**vars(self), "steps": steps}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        data = json.loads(text)
        data["steps"] = [Step(**{**s, "collectives": [Collective(*c) for c in s["collectives"]]}) for s in data["steps"]]
        return cls(**data)
