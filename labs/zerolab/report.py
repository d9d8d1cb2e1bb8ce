"""Results with their provenance: what a run leaves behind, how it is saved, loaded and compared."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from zerolab import trace
from zerolab.machine import provenance_line
from zerolab.trace import Collective

FORMAT = 1
RESULTS = Path(__file__).resolve().parent.parent / "results"


def results_folder(machine: str = "local") -> Path:
    """Where records of a machine lie. "local" is this machine's own; ZEROLAB_RESULTS moves it elsewhere."""
    if machine == "local" and "ZEROLAB_RESULTS" in os.environ:
        return Path(os.environ["ZEROLAB_RESULTS"])
    return RESULTS / machine


def recorded_machines() -> list[str]:
    """Folders of recorded runs that came with the course, such as "h200-x2-nvlink"."""
    return sorted(p.name for p in RESULTS.iterdir() if p.is_dir() and p.name != "local") if RESULTS.exists() else []


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times with its 95 % interval. rounds: how many paired rounds it rests on."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def sure(self) -> bool:
        """True if the interval leaves 1 out: then a difference was measured."""
        return not self.low <= 1 <= self.high

    def __str__(self):
        return f"×{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(times: list[float], base: list[float]) -> Ratio:
    """Geometric mean of the rounds' ratios and its 95 % interval (Student's t on the logarithms; NaN below two rounds).

    times, base: seconds, one number a round, of two variants that ran in the same rounds.
    """
    logs = [math.log(a / b) for a, b in zip(times, base)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), math.nan, math.nan, len(logs))
    from scipy.stats import t

    half = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


class Variant:
    """What was seen of one variant. `data` is its JSON; a part that was not measured is absent and reads as None or empty."""

    def __init__(self, name: str, data: dict):
        self.name, self.data = name, data

    @property
    def status(self) -> str:
        """ "ok", "rejected", "out of memory", "died", "hung", "failed" or "not run"."""
        return self.data.get("status", "not run")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def foretold(self) -> bool:
        """True if these are predictions, not measurements (`Experiment.foretold`)."""
        return self.data.get("foretold", False)

    @property
    def message(self) -> str:
        return self.data.get("message", "")

    @property
    def log(self) -> str:
        """The tail of the ranks' output, where something went wrong."""
        return self.data.get("log", "")

    @property
    def zero(self) -> dict:
        """The `zero_optimization` section it ran with (defaults left out)."""
        return self.data["variant"]["zero"]

    def collectives(self, step: int = -1) -> list[Collective]:
        """The ordered collectives of one step as rank 0 issued them; the last is the steady one, 0 the very first."""
        steps = self.data.get("collectives")
        if not steps:
            raise LookupError(f"{self.name}: no collectives were recorded ({self.status}: {self.message})")
        return [Collective(*c) for c in steps[step]]

    def count(self, op=None, phase=None, step=-1) -> int:
        return trace.count(self.collectives(step), op, phase)

    def elements(self, op=None, phase=None, step=-1) -> int:
        return trace.elements(self.collectives(step), op, phase)

    def bytes(self, op=None, phase=None, step=-1) -> int:
        return sum(c.bytes for c in trace.select(self.collectives(step), op, phase))

    @property
    def passes(self) -> float:
        """How many times a micro-step gathers the whole model: gathered elements over the model's, optimizer step left out."""
        gathered = self.elements("all_gather", "forward") + self.elements("all_gather", "backward")
        return gathered / self.data["model"]["elements"] / self.data["variant"]["accumulation"]

    @property
    def model(self) -> dict:
        """elements, trainable, tensors, largest, persistent_tensors, persistent_elements."""
        return self.data.get("model", {})

    @property
    def peak_resident(self) -> int:
        """The most gathered elements at once in the steady step, persistent ones included."""
        return self.data["resident"]["peak"]

    @property
    def kept(self) -> int:
        """Elements that stay gathered from the end of a forward into its backward, persistent ones left out."""
        return max(self.data["resident"]["kept"])

    @property
    def holdings(self) -> dict:
        """{part: {"bytes", "device"}}: what a rank keeps between steps."""
        return self.data.get("holdings", {})

    @property
    def memory(self) -> dict:
        """Bytes: largest allocation above its start in each phase (fresh process); on a GPU also rest, allocated, reserved."""
        return self.data.get("memory", {})

    @property
    def tiles(self) -> list[int]:
        """Elements of each optimizer sub-group on this rank: what step() works on at one time."""
        return self.data.get("tiles", [])

    def alive(self, after_backward: bool = False, dtypes: str = "") -> int:
        """Bytes of floating-point tensors alive on a rank: between steps, or after the first backward of a step (watch "alive").

        dtypes: only those whose name begins so ("bfloat16", "float32"). Other tensors (tokens, flags) are left out.
        """
        found = self.data["alive_after_backward" if after_backward else "alive"]
        return sum(n for dtype, n in found.items() if "float" in dtype and dtype.startswith(dtypes))

    def ops(self, name: str, phase: str = "backward") -> int:
        """Calls of an ATen operator ("copy_") in a phase of one step (watch "ops")."""
        return self.data["ops"][phase].get(name, 0)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank receives in the steady step with ring algorithms, tensors of a single element left out."""
        return trace.wire_bytes([c for c in self.collectives() if c.elements > 1], self.data["world"])

    @property
    def host_copies(self) -> dict:
        """Bytes of parameter shards that gathers asked to be on the device, by phase: host-to-device traffic under offload_param."""
        return self.data.get("host_copies", {})

    @property
    def shard_passes(self) -> float:
        """Those bytes in a micro-step, over the bytes of this rank's whole shard."""
        shard = self.holdings["parameters"]["bytes"]
        return sum(self.host_copies.values()) / shard / self.data["variant"]["accumulation"]

    @property
    def optimizer_traffic(self) -> dict:
        """{"to_host": {phase: bytes}, "to_device": {phase: bytes}} of a step: what an offloaded optimizer moves on one rank."""
        return self.data.get("optimizer_traffic", {})

    @property
    def pinned(self) -> dict:
        """bytes, calls: what DeepSpeed asked to page-lock while the engine was built."""
        return self.data.get("pinned", {})

    def times(self, phase: str = "total") -> list[float]:
        """Seconds, one median a round. phase: "total", "forward", "backward" or "step"."""
        return [statistics.median(s[phase] for s in block) for block in self.data.get("times", [])]

    def seconds(self, phase: str = "total") -> float:
        """Median over rounds, in seconds; NaN when it was not timed."""
        times = self.times(phase)
        return statistics.median(times) if times else math.nan

    def __repr__(self):
        return f"<Variant {self.name}: {self.status}{' – ' + self.message if self.message else ''}>"


class Report:
    """All variants of one experiment on one machine. Iterates over variants; `report["name"]` is one of them."""

    def __init__(self, name: str, experiment: dict, provenance: dict, variants: dict[str, dict], complete=True):
        self.name, self.experiment, self.provenance, self.complete = name, experiment, provenance, complete
        self.variants = {key: Variant(key, data) for key, data in variants.items()}

    def __getitem__(self, name: str) -> Variant:
        if name not in self.variants:
            raise KeyError(f"no variant {name!r}; there are {', '.join(map(repr, self.variants))}")
        return self.variants[name]

    def __iter__(self):
        return iter(self.variants.values())

    @property
    def base(self) -> str:
        """The first variant, to which others are compared unless told otherwise."""
        return next(iter(self.variants))

    @property
    def line(self) -> str:
        """The provenance line."""
        return provenance_line(self.provenance)

    def ratio(self, name: str, base: str | None = None, phase: str = "total") -> Ratio:
        """Time of a variant over the base variant's, paired by rounds of the same run.

        Raises LookupError when one of the two was not timed here.
        """
        base = base or self.base
        for n in (name, base):
            if not self[n].times(phase):
                raise LookupError(f"{n!r} was not timed ({self[n].status}: {self[n].message})")
        return paired_ratio(self[name].times(phase), self[base].times(phase))

    def to_json(self) -> dict:
        return {
            "format": FORMAT,
            "name": self.name,
            "complete": self.complete,
            "provenance": self.provenance,
            "experiment": self.experiment,
            "variants": {key: v.data for key, v in self.variants.items()},
        }

    def save(self, path: str | Path) -> Path:
        """Write the JSON at once or not at all. Raises OSError with the path when it cannot be written."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(self.to_json(), separators=(",", ":")))
        scratch.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a saved report. Raises FileNotFoundError, or ValueError for another format."""
        data = json.loads(Path(path).read_text())
        if data.get("format") != FORMAT:
            raise ValueError(f"{path}: format {data.get('format')} of a zerolab report; this version reads {FORMAT}")
        return cls(data["name"], data["experiment"], data["provenance"], data["variants"], data["complete"])

    def _repr_html_(self):
        from zerolab.tables import summary

        return summary(self)


def load(name: str, machine: str = "local") -> Report:
    """The saved report of a lab ("05", "05_reduce_bucket_size") on a machine. Raises FileNotFoundError that says what to run."""
    folder = results_folder(machine)
    found = sorted(folder.glob(f"{name}*.json")) if folder.exists() else []
    if not found:
        raise FileNotFoundError(f"no result {name} in {folder.name}/: run `zerolab run {name.split('_')[0]}` first")
    return Report.load(found[0])


def recorded(name: str) -> list[Report]:
    """The reports of a lab on every recorded machine that has one."""
    found = []
    for machine in recorded_machines():
        try:
            found.append(load(name, machine))
        except FileNotFoundError:
            continue
    return found


def compare(a: Report, b: Report) -> list[dict]:
    """What two reports have in common, variant by variant: counts (must be equal on equal worlds) and time ratios to each base.

    Rows: {"variant", "counts_equal", "collectives": (a, b), "ratio": (a, b)}; ratios are None where one was not timed.
    """
    rows = []
    for name in a.variants:
        if name not in b.variants:
            continue
        va, vb = a[name], b[name]
        both = bool(va.data.get("collectives")) and bool(vb.data.get("collectives"))
        keys = [[c.key for c in v.collectives()] for v in (va, vb)] if both else None
        timed = [r.ratio(name) if r[name].times() and r[r.base].times() else None for r in (a, b)]
        rows.append(
            {
                "variant": name,
                "counts_equal": keys[0] == keys[1] if keys else None,
                "collectives": tuple(len(k) for k in keys) if keys else (None, None),
                "ratio": tuple(timed),
            }
        )
    return rows
