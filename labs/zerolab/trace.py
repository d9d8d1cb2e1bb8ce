"""What went over the wire: one `Collective` per call, plus the few sums that the course shows.

Sizes follow one convention everywhere: an all-gather counts its gathered output, a reduce-scatter its reduced input,
anything else the tensor itself, all per rank. (DeepSpeed's own `comms_logger` counts an all-gather by its input shard.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

PHASES = ("forward", "backward", "step")
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "broadcast": "BC", "reduce": "RD"}


class Collective(NamedTuple):
    """One collective as one rank issued it.

    op: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "reduce".
    elements, bytes: size by the module's convention.
    phase: "forward", "backward" or "step"; micro: micro-step within the optimizer step, from 0.
    start, end: seconds since the optimizer step began, None where they were not measured.
    """

    op: str
    elements: int
    bytes: int
    phase: str
    micro: int
    start: float | None = None
    end: float | None = None

    @property
    def key(self) -> tuple:
        """Everything that is exact, nothing that is timed: what a prediction is compared by."""
        return self[:5]


def select(collectives: Iterable[Collective], op: str | None = None, phase: str | None = None) -> list[Collective]:
    """The collectives of one op and one phase; None means any."""
    return [c for c in collectives if op in (None, c.op) and phase in (None, c.phase)]


def count(collectives: Iterable[Collective], op: str | None = None, phase: str | None = None) -> int:
    """How many collectives there are of one op and one phase."""
    return len(select(collectives, op, phase))


def elements(collectives: Iterable[Collective], op: str | None = None, phase: str | None = None) -> int:
    """Elements in all collectives of one op and one phase."""
    return sum(c.elements for c in select(collectives, op, phase))


def by_phase(collectives: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """{(op, phase): (count, elements, bytes)} in the order in which the pairs first occur."""
    table: dict[tuple[str, str], tuple[int, int, int]] = {}
    for c in collectives:
        n, e, b = table.get((c.op, c.phase), (0, 0, 0))
        table[c.op, c.phase] = n + 1, e + c.elements, b + c.bytes
    return table


def wire_bytes(collectives: Iterable[Collective], world: int) -> float:
    """Bytes that one rank receives with ring algorithms: (N-1)/N of the size, twice that for an all-reduce."""
    return sum(c.bytes * (2 if c.op == "all_reduce" else 1) * (world - 1) / world for c in collectives)


def difference(expected: Iterable[Collective], actual: Iterable[Collective], limit: int = 8) -> str:
    """Empty if the two lists agree in everything exact, else a few lines that show where they part."""
    left, right = [c.key for c in expected], [c.key for c in actual]
    if left == right:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
    lines = [f"{len(left)} expected, {len(right)} found; they part at number {at}:"]
    for i in range(max(0, at - 2), at + limit):
        a = left[i] if i < len(left) else "-"
        b = right[i] if i < len(right) else "-"
        if (a, b) != ("-", "-"):
            lines.append(f"  {i:4d} {'  ' if a == b else '≠ '} expected {a}   found {b}")
    surplus = Counter(left) - Counter(right), Counter(right) - Counter(left)
    if not any(surplus):
        lines.append("  the same collectives, in another order")
    return "\n".join(lines)
