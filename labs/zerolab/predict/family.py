"""Traces of a decoder of any depth, batch and adapter rank from a few captures of a shallow one.

All inner layers of a decoder do the same, each with a little more kept from the layers before it. So a capture of four layers holds
a hundred: the first, the last, and two inner ones whose difference says how memory grows. What it computes and keeps is a polynomial
in tokens and rank. Both are checked against real captures (tests/test_family.py). Pure Python; only `build` needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .moduletrace import Module, ModuleTrace, Parameter

SHALLOW = 4
LAYER = re.compile(r"\blayers\.(\d+)\b")


def layer_of(name: str) -> int | None:
    found = LAYER.search(name)
    return int(found[1]) if found else None


def _numbered(name: str, layer: int) -> str:
    return LAYER.sub(f"layers.{layer}", name, count=1)


def _runs(layers: Sequence[int | None]):
    """Cut a sequence into runs: (start, end, layered?)."""
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or (layers[i] is None) != (layers[start] is None):
            yield start, i, layers[start] is not None
            start = i


def _unrolled(layers: Sequence[int | None], depth: int):
    """(index in the shallow sequence, its layer in the deep one or None), for a sequence with the layer of each item.

    Raises ValueError if the items of a layer do not lie together.
    """
    for start, end, layered in _runs(layers):
        if not layered:
            yield from ((i, None) for i in range(start, end))
            continue
        members: dict[int, list[int]] = {}
        for i in range(start, end):
            if layers[i] in members and layers[i] != layers[i - 1]:
                raise ValueError(f"layer {layers[i]} comes twice: these layers are not run one after the other")
            members.setdefault(layers[i], []).append(i)
        if sorted(members) != list(range(SHALLOW)):
            raise ValueError(f"a run with layers {sorted(members)}, not with all {SHALLOW}")
        for layer in range(depth) if layers[start] == 0 else reversed(range(depth)):
            shallow = _source(layer, depth)
            yield from ((i, layer) for i in members[shallow])


def _source(layer: int, depth: int) -> int:
    """The shallow layer that a deep one is a copy of."""
    return 0 if layer == 0 else SHALLOW - 1 if layer == depth - 1 else 1


def deepen(trace: ModuleTrace, depth: int) -> ModuleTrace:
    """A trace with `depth` layers from one with four. Raises ValueError if depth is below four or the layers are not alike."""
    if depth < SHALLOW:
        raise ValueError(f"at least {SHALLOW} layers")
    if depth == SHALLOW:
        return trace
    parameter_layer = [layer_of(p.name) for p in trace.parameters]
    module_layer = [layer_of(m.name) for m in trace.modules]
    new_parameter = {key: new for new, key in enumerate(_unrolled(parameter_layer, depth))}
    new_module = {key: new for new, key in enumerate(_unrolled(module_layer, depth))}

    def parameter(old: int, layer: int | None) -> int:
        return new_parameter[old, layer if parameter_layer[old] is not None else None]

    def module(old: int, layer: int | None) -> int:
        return new_module[old, layer if module_layer[old] is not None else None]

    def named(item, layer):
        return item if layer is None else item._replace(name=_numbered(item.name, layer))

    parameters = [named(trace.parameters[old], layer) for old, layer in new_parameter]
    modules = [
        named(trace.modules[old], layer)._replace(parameters=[parameter(p, layer) for p in trace.modules[old].parameters])
        for old, layer in new_module
    ]
    order = [parameter(trace.order[i], layer) for i, layer in _unrolled([parameter_layer[p] for p in trace.order], depth)]

    def event(old: list, layer: int | None) -> list:
        kind, index, *rest = old
        if kind in ("G", "L"):
            return [kind, parameter(index, layer)]
        return [kind, module(index, layer), *(parameter(p, layer) for p in rest)]

    def played(events: list[list], spans: list[list[int]], forward: bool):
        layers = [parameter_layer[e[1]] if e[0] in ("G", "L") else module_layer[e[1]] for e in events]
        inner = {layer: [i for i, at in enumerate(layers) if at == layer] for layer in (1, 2)}
        if len(inner[1]) != len(inner[2]):
            raise ValueError("inner layers differ in their events")
        place = {i: j for layer in inner for j, i in enumerate(inner[layer])}
        ends = [spans[inner[2][j] + 1][k] - spans[inner[1][j] + 1][k] for j in (-1,) for k in range(2)]
        deep_events, deep_spans = [], []
        # All that runs while every layer's activations are there grows with the depth: after a forward, before a backward.
        beside_all = not forward
        deep_spans.append(_grown(spans[0], ends, depth - SHALLOW if beside_all else 0))
        for i, layer in _unrolled(layers, depth):
            deep_events.append(event(events[i], layer))
            if layer is None:
                more, growth = (depth - SHALLOW if beside_all else 0), ends
            else:
                beside_all = forward
                growth = ends
                if i in place:
                    a, b = (spans[inner[k][place[i]] + 1] for k in (1, 2))
                    growth = [b[0] - a[0], b[1] - a[1]]
                more = layer - layers[i]
            deep_spans.append(_grown(spans[i + 1], growth, more))
        return deep_events, deep_spans

    forward, forward_spans = played(trace.forward, trace.forward_spans, True)
    backward, backward_spans = played(trace.backward, trace.backward_spans, False)
    return ModuleTrace(parameters, order, modules, forward, backward, trace.linear, trace.refused, forward_spans, backward_spans)


def _grown(span: list[int], growth: list[int], layers: int) -> list[int]:
    return [span[0] + growth[0] * layers, span[1] + growth[1] * layers, *span[2:]]


# --- tokens and rank ---


def _terms(micro_batch: int, seq: int, lora: int) -> list[float]:
    """What elements, bytes and operations of a decoder are linear in. Angles of positions are one sequence long; the loss drops a token
    of each sequence, and with more than one sequence that makes a copy."""
    tokens, several = micro_batch * seq, int(micro_batch > 1)
    adapters = [lora, tokens * lora] if lora else []
    return [1, tokens, tokens * seq, micro_batch, several * tokens, several * micro_batch, several * seq, *adapters]


# As many captures as there are terms, so that the polynomial goes through all of them.
FULL_POINTS = ((1, 512, 0), (1, 1024, 0), (1, 2048, 0), (2, 512, 0), (4, 512, 0), (2, 2048, 0), (4, 2048, 0))
LORA_POINTS = tuple((b, s, 8) for b, s, _ in FULL_POINTS) + ((1, 512, 32), (1, 2048, 32))


@dataclass(frozen=True)
class Family:
    """One model with its kind of checkpointing, fully fine-tuned or with adapters; `trace` makes any member.

    layers: of the real model. shallow: ModuleTrace of four layers. elements: for each parameter, and forward, backward: for each
    span, the coefficients of `_terms` for each of its numbers.
    """

    layers: int
    shallow: ModuleTrace
    elements: list[list[float]]
    forward: list[list[list[float]]]
    backward: list[list[list[float]]]

    def trace(self, micro_batch: int = 1, seq: int = 1024, lora: int = 0, layers: int | None = None) -> ModuleTrace:
        """The trace of a member. lora must be 0 for a family of full fine-tuning and above 0 for one with adapters (ValueError)."""
        terms = _terms(micro_batch, seq, lora)
        if len(terms) != len(self.elements[0]):
            raise ValueError("a family is made with adapters or without")

        def value(coefficients):
            return max(0, round(sum(c * t for c, t in zip(coefficients, terms))))

        old = self.shallow
        parameters = [p._replace(elements=value(c)) for p, c in zip(old.parameters, self.elements)]
        spans = [[[value(c) for c in span] for span in side] for side in (self.forward, self.backward)]
        member = ModuleTrace(parameters, old.order, old.modules, old.forward, old.backward, old.linear, old.refused, *spans)
        return deepen(member, layers or self.layers)

    def to_json(self) -> str:
        parts = {"layers": self.layers, "elements": self.elements, "forward": self.forward, "backward": self.backward}
        return json.dumps({**parts, "shallow": json.loads(self.shallow.to_json())}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Family:
        data = json.loads(text)
        shallow = data.pop("shallow")
        shallow["parameters"] = [Parameter(*p) for p in shallow["parameters"]]
        shallow["modules"] = [Module(*m) for m in shallow["modules"]]
        return cls(shallow=ModuleTrace(**shallow), **data)


def build(layers: int, lora: bool, capture: Callable[[int, int, int], ModuleTrace]) -> Family:
    """capture(micro_batch, seq, lora) → the trace of the model with four layers, called for each of the points above."""
    import numpy as np

    points = LORA_POINTS if lora else FULL_POINTS
    traces = [capture(*point) for point in points]
    matrix = np.array([_terms(*point) for point in points], dtype=float)
    inverse, largest = np.linalg.inv(matrix), matrix.max(axis=0)

    def coefficients(values: list[int]) -> list[float]:
        found = inverse @ np.array(values, dtype=float)
        noise = 2.0**-40 * max(1, max(values))  # what is only rounding becomes zero
        return [0 if abs(c) * t <= noise else float(c) for c, t in zip(found, largest)]

    elements = [coefficients([p.elements for p in same]) for same in zip(*(t.parameters for t in traces))]
    sides = []
    for side in ("forward_spans", "backward_spans"):
        spans = zip(*(getattr(t, side) for t in traces))
        sides.append([[coefficients(list(numbers)) for numbers in zip(*same)] for same in spans])
    bare = traces[0]
    shallow = ModuleTrace(bare.parameters, bare.order, bare.modules, bare.forward, bare.backward, bare.linear, bare.refused)
    return Family(layers, shallow, elements, *sides)
