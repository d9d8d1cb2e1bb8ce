"""Seconds of a step: the schedule on four lanes (host, compute, link, copies), with a machine's measured rates.

`zerolab calibrate` measures a `Machine`; `MACHINES` holds recorded ones. The lanes know what DeepSpeed waits for: a module's hook
makes the compute stream wait for every gather issued so far (fetch_sub_module in
deepspeed/runtime/zero/partitioned_param_coordinator.py), so a prefetch hides behind one module's work, not behind several.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

LANES = ("host", "compute", "link", "copies")


@dataclass(frozen=True)
class Machine:
    """Rates of one rank of a machine. source: the record they come from.

    flops: 16-bit matrix products, operations/s. memory: device memory, bytes/s. operator, hook, collective, parameter: host seconds
    for one operator, one module hook of ZeRO-3, one collective, one parameter in it. tile: seconds for one optimizer sub-group.
    latency (s) and bandwidth (bytes/s) of the link as a ring uses it: bytes · (N-1)/N ÷ s ("bus bandwidth" of nccl-tests).
    host_step: elements/s of a whole optimizer step on the host (norm, unscaling, DeepSpeed's CPU Adam, new weights to the device).
    pinned, pageable: bytes/s between host and device. shared: computing is done by the thread that also runs the hooks (CPU ranks).
    """

    name: str
    source: str
    flops: float
    memory: float
    operator: float
    hook: float
    collective: float
    parameter: float
    tile: float
    latency: float
    bandwidth: float
    host_step: float
    pinned: float
    pageable: float
    shared: bool = False

    def linked(self, link: Machine) -> Machine:
        """This machine with another's link."""
        return replace(self, name=f"{self.name}, {link.name}", latency=link.latency, bandwidth=link.bandwidth)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """From a file that `zerolab calibrate` wrote. Raises OSError, ValueError, or KeyError if something is missing."""
        data = json.loads(Path(path).read_text())["machine"]
        return cls(**{f.name: data[f.name] for f in fields(cls)})


class Lanes:
    """Where each lane stands, in seconds since the step began. keep: also keep every busy interval, for a picture."""

    def __init__(self, machine: Machine, world: int, overlap: bool, pinned: bool, keep: bool = False):
        self.machine, self.share, self.overlap = machine, (world - 1) / world, overlap
        self.pinned, self.copy_rate = pinned, machine.pinned if pinned else machine.pageable
        self.keep = keep
        self.begin()

    def begin(self) -> None:
        self.at = dict.fromkeys(LANES, 0.0)
        self.busy = dict.fromkeys(LANES, 0.0)
        self.intervals: dict[str, list[list[float]]] = {lane: [] for lane in LANES}
        self.arrives: dict[int, float] = {}
        self.fetched = 0.0  # end of the last copy of a rank that owns all
        self.inflight: set[int] = set()  # what such a rank has asked for and not waited for
        self.seconds: dict[str, float] = {}
        self.current, self.since = "", 0.0

    def _work(self, lane: str, seconds: float, after: float = 0.0) -> float:
        """Put work on a lane, not before `after`; returns its end."""
        start = max(self.at[lane], after)
        self.at[lane] = start + seconds
        self.busy[lane] += seconds
        if self.keep and seconds:
            self.intervals[lane].append([start, start + seconds])
        return self.at[lane]

    def phase(self, name: str) -> None:
        """A phase begins; what came before belongs to the one before it."""
        now = self.settle()
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self.since
        self.current, self.since = name, now

    def mark(self) -> tuple:
        return self.now, dict(self.busy), dict(self.seconds), {lane: len(kept) for lane, kept in self.intervals.items()}

    def since_mark(self, mark: tuple) -> tuple:
        """What happened since a mark, to be repeated elsewhere."""
        now, busy, seconds, kept = mark
        return (
            self.now - now,
            {lane: self.busy[lane] - busy[lane] for lane in LANES},
            {phase: total - seconds.get(phase, 0.0) for phase, total in self.seconds.items()},
            {lane: [[a - now, b - now] for a, b in self.intervals[lane][kept[lane] :]] for lane in LANES},
        )

    def repeat(self, happened: tuple) -> None:
        duration, busy, seconds, intervals = happened
        start = self.now
        for lane in LANES:
            self.busy[lane] += busy[lane]
            self.at[lane] = start + duration
            self.intervals[lane] += [[start + a, start + b] for a, b in intervals[lane]]
        for phase, more in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + more
        self.since = self.now

    @property
    def now(self) -> float:
        return max(self.at.values())

    def settle(self) -> float:
        """All lanes meet: the host waits for the device."""
        now = self.now
        self.at = dict.fromkeys(LANES, now)
        return now

    def compute(self, flops: float, moved: float, operators: int) -> None:
        """Work of the model between two hooks."""
        if not operators:
            return
        m = self.machine
        seconds = max(flops / m.flops, moved / m.memory)
        issued = self._work("host", operators * m.operator)
        end = self._work("compute", seconds, after=issued - operators * m.operator)
        if m.shared:
            self.at["host"] = max(self.at["host"], end)

    def hook(self) -> None:
        self._work("host", self.machine.hook)

    def gather(self, params: list[int], size: float, host_bytes: float = 0, wait: bool = False) -> None:
        """An all-gather of `size` bytes. host_bytes: of this rank's shard, copied from the host first."""
        issued = self._work("host", self.machine.collective + len(params) * self.machine.parameter)
        if host_bytes:
            issued = self._copy(host_bytes)
        end = self._send(size, issued)
        for p in params:
            self.arrives[p] = end
        if wait:
            self.wait(params)

    def _send(self, size: float, after: float) -> float:
        m = self.machine
        return self._work("link", (m.latency + size * self.share / m.bandwidth) if self.share else 0.0, after)

    def _copy(self, size: float) -> float:
        """Between host and device. The host waits, also for pinned memory: DeepSpeed calls `.to(device)` without `non_blocking`
        (_all_gather_sequential, _all_gather_dtype in deepspeed/runtime/zero/partition_parameters.py)."""
        self.at["host"] = self._work("copies", size / self.copy_rate, after=self.at["host"])
        return self.at["host"]

    def fetch_own(self, params: list[int], size: float) -> None:
        """The only rank of a group copies its parameters from the host; the host goes on if they are pinned (NoGatherCoalescedHandle in
        deepspeed/runtime/zero/partition_parameters.py: `non_blocking`), until it waits for one of them."""
        self.inflight.update(params)
        self.fetched = self._work("copies", size / self.copy_rate, after=self.at["host"])
        if not self.pinned:
            self.at["host"] = self.fetched
        for p in params:
            self.arrives[p] = self.fetched

    def wait(self, params: list[int]) -> None:
        """What a module needs is there. Streams wait for all gathers issued so far, a CPU rank for its own parameters. A rank that
        fetches its own stops its host until every copy issued so far has ended (NoGatherCoalescedHandle.wait: `synchronize`)."""
        if self.machine.shared:
            self.at["host"] = max([self.at["host"], *(self.arrives.get(p, 0.0) for p in params)])
            self.at["compute"] = self.at["host"]
        else:
            if not self.inflight.isdisjoint(params):
                self.inflight.difference_update(params)
                self.at["host"] = max(self.at["host"], self.fetched)
            self.at["compute"] = max(self.at["compute"], self.at["link"], self.fetched)

    def reduce(self, count: int, size: float) -> None:
        """A reduction of `count` gradients: it needs them computed; without overlap_comm the compute stream waits for it."""
        issued = self._work("host", self.machine.collective + count * self.machine.parameter)
        end = self._send(size, max(issued, self.at["compute"]))
        if not self.overlap or self.machine.shared:
            self.at["compute"] = max(self.at["compute"], end)
        if self.machine.shared:
            self.at["host"] = max(self.at["host"], end)

    def optimizer(self, tiles_here: list[int], away: int, traffic: float) -> None:
        """The step: tiles on the device one by one, then elements on the host. traffic: bytes of gradients between the two."""
        m = self.machine
        self.settle()
        for tile in tiles_here:
            self._work("host", m.tile)
            end = self._work("compute", 48 * tile / m.memory, after=self.at["host"])  # 12 passes over 32-bit words
            self.at["host"] = max(self.at["host"], end) if m.shared else self.at["host"]
        if away:
            self._work("copies", traffic / self.copy_rate, after=self.settle())
            self._work("host", away / m.host_step, after=self.settle())
        self.settle()


def bounds(busy: dict[str, float]) -> tuple[float, float]:
    """A step takes at least as long as its busiest lane (perfect overlap) and at most as long as all together (none)."""
    return max(busy.values()), sum(busy.values())
