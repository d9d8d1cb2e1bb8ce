"""An experiment: one model, several configs, real ranks. What a lab's reader touches.

    Experiment("05", {"small": {"reduce_bucket_size": 1e4}, "large": {"reduce_bucket_size": 5e8}}).run()
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from zerolab import machine, ranks
from zerolab.progress import Progress
from zerolab.ranks import RanksError
from zerolab.report import Report, results_folder
from zerolab.trace import Collective, difference
from zerolab.tunnel import shrink

# What a variant may say beside keys of `zero_optimization`.
OWN_KEYS = ("model", "micro_batch", "seq", "accumulation", "wire", "threads", "ds_config", "zero_optimization")


class ZerolabError(RuntimeError):
    """Something the reader can mend; the message says how."""


@dataclass
class Experiment:
    """A model, variants of its config, and how to measure them.

    name: of the result file. variants: {label: {zero_optimization key: value, ...}}; a variant may also hold any of `OWN_KEYS`.
    model: a spec for `zerolab.model.build`; with a `scale`, thresholds are those of the full model and shrink with it (see
    `tunnel`). base: zero_optimization keys that all variants share. world: ranks (default
    ZEROLAB_WORLD or 4). micro_batch, seq: input per rank and micro-step; accumulation: micro-steps in an optimizer step.
    warmup: steps before anything counts (3: a trace must be complete). rounds × steps: timed blocks per variant, in
    rotating order; rounds=0 counts only. watch: parts of the watch pass ("memory", "timeline", "alive", "ops"). fresh: a group of its own
    for each watched variant, since engines leave memory behind; without it the engines that are timed are watched while they warm up,
    and once more after the last round (not on GPUs where memory is watched). wire: an emulated link,
    {"latency": s, "bandwidth": bytes/s}. limit: seconds of silence after which a group counts as hung. cap: GiB per rank, beyond
    which allocations fail. isolate: a fresh group for each variant also when timing. function, arguments: what the ranks call in
    place of clock and watch, see `run_with`. foretold: variants that are predicted and not run; counts are as exact, and the report says
    which they are. gpu: fields to replace on the GPU tier.
    """

    name: str
    variants: dict[str, dict]
    model: dict = field(default_factory=lambda: {"size": "tiny"})
    base: dict = field(default_factory=dict)
    world: int | None = None
    micro_batch: int = 1
    seq: int = 64
    accumulation: int = 1
    warmup: int = 3
    rounds: int = 5
    steps: int = 2
    watch: tuple = ("memory", "timeline")
    fresh: bool = True
    wire: dict | None = None
    limit: float = 120
    cap: float | None = None
    isolate: bool = False
    function: str | None = None
    arguments: dict = field(default_factory=dict)
    foretold: tuple = ()
    gpu: dict = field(default_factory=dict)

    def __post_init__(self):
        self.world = self.world or machine.world_size()
        if self.gpu and machine.tier(self.world) == "gpu":
            for key, value in self.gpu.items():
                setattr(self, key, value)
        if "memory" in self.watch and machine.tier(self.world) == "gpu":
            self.fresh = True  # a card's absolute peak is right only where no other engine lies beside
        if self.warmup < (3 if self.rounds else 1):
            raise ZerolabError("warmup must be at least 3 before timing: the first steps record the trace")
        if not self.variants:
            raise ZerolabError("an experiment needs at least one variant")

    def spec(self, label: str) -> dict:
        """The full JSON of one variant, as the ranks get it."""
        own = {k: v for k, v in self.variants[label].items() if k in OWN_KEYS}
        zero = {k: v for k, v in self.variants[label].items() if k not in OWN_KEYS}
        model = {**self.model, **own.get("model", {})}
        return {
            "model": model,
            "micro_batch": own.get("micro_batch", self.micro_batch),
            "seq": own.get("seq", self.seq),
            "accumulation": own.get("accumulation", self.accumulation),
            "wire": own.get("wire", self.wire),
            "threads": own.get("threads") or machine.threads(self.world),
            "ds_config": own.get("ds_config", {}),
            "zero": shrink({**self.base, **own.get("zero_optimization", {}), **zero}, model.get("scale", 1)),
        }

    def run(self, save: str | Path | bool = True, progress: bool = True) -> Report:
        """Run on real ranks and return the report; what fails is in it, as that variant's status.

        save: True writes results/local/NAME.json, a path writes there, False nowhere. Written after every group, so that what
        was measured survives a fault or Ctrl-C. Raises ZerolabError when nothing can run.
        """
        if self.function:
            return self.run_with(self.function, save=bool(save), progress=progress, **self.arguments)
        path = results_folder() / f"{self.name}.json" if save is True else save
        report = Report(self.name, self.to_json(), machine.provenance(self.world), self._blank(), complete=False)
        for label, data in self._foretell().items():
            report[label].data.update(data)
        if path:
            _check_writable(Path(path), report)
        if any(self.spec(v)["wire"] for v in self.variants) and machine.tier(self.world) == "gpu":
            raise ZerolabError("the emulated wire is for the CPU tier: GPUs have a real one")
        run = _Run(self, report, path, progress)
        with _one_at_a_time(self.rounds > 0):
            try:
                run.everything()
            finally:
                run.close()
        report.complete = True
        if path:
            report.save(path)
        return report

    def run_with(self, function: str, save: bool = True, progress: bool = True, **arguments) -> Report:
        """Run a function of the lab's own on every rank in place of clock and watch: its data as a report, saved like any other.

        function: "module:name", called as name(rank, world, device, variants={label: spec}, **arguments); what rank 0 returns,
        {label: data}, becomes the variants' data (see `report.Variant`). With `isolate` each variant gets a fresh group of ranks.
        Raises RanksError when a rank fails.
        """
        report = Report(self.name, self.to_json(), machine.provenance(self.world), self._blank())
        groups = [[v] for v in self.variants] if self.isolate else [list(self.variants)]
        bar = Progress(len(groups), f"{self.name}: {function.partition(':')[2]}", show=progress)
        try:
            for labels in groups:
                job = {"call": function, "arguments": {**arguments, "variants": {v: self.spec(v) for v in labels}}, "limit": self.limit}
                for label, data in call(job, self.world)[0].items():
                    report[label].data.update(data, status="ok")
                bar.update()
        finally:
            bar.close()
        report.provenance.update(facts(self.world))
        if save:
            report.save(results_folder() / f"{self.name}.json")
        return report

    def collect(self, path: str | Path) -> Report:
        """The report of ranks that DeepSpeed's launcher started on any number of machines, from the JSON lines that they left.

        They ran `self.job("clock", labels, then_watch=True)`, saved as JSON: `deepspeed --hostfile hosts --module zerolab.ranks.rank JOB OUT`.
        """
        report = Report(self.name, self.to_json(), machine.provenance(self.world), self._blank())
        run = _Run(self, report, None, progress=False)
        for line in Path(path).read_text().splitlines():
            run.take(json.loads(line))
        run.close()
        return report

    def predict(self) -> dict:
        """{variant: Schedule}: every collective of this experiment, worked out without running it."""
        from zerolab.predict import Schedule

        return {label: Schedule.from_json(data) for label, data in self._predicted("schedules_json", self.variants).items()}

    def _predicted(self, function: str, labels, **more) -> dict:
        job = {"work": "plain", "call": f"zerolab.predict.specs:{function}", "threads": 1, "limit": self.limit}
        job["arguments"] = {"specs": {v: self.spec(v) for v in labels}, "world": self.world, **more}
        return call(job, world=1, accelerator_name=accelerator(self.world))[0]

    def _foretell(self) -> dict:
        """{variant: data} of those that are predicted, in the shape that a run would leave."""
        return self._predicted("foretold", self.foretold, steps=self.warmup) if self.foretold else {}

    def confirm(self, report: Report) -> list[str]:
        """The labels of a report's variants that ran well and were not foretold.

        Raises AssertionError unless each of them made the predicted collectives, element for element, in every recorded step.
        """
        ran = [v.name for v in report if v.ok and not v.foretold]
        for label, data in self._predicted("foretold", ran, steps=self.warmup).items():
            for step, expected in enumerate(data["collectives"]):
                wrong = difference([Collective(*c) for c in expected], report[label].collectives(step))
                assert not wrong, f"{label}, step {step}: {wrong}"
        return ran

    def replace(self, **changes) -> Experiment:
        """The same experiment with some fields changed (its `gpu` replacements are already in)."""
        return dataclasses.replace(self, **{"gpu": {}, **changes})

    def mine(self, **zero) -> Experiment:
        """The first variant with the reader's own values, as a variant "mine" that is counted, not timed."""
        first = next(iter(self.variants.values()))
        return self.replace(variants={"mine": {**first, **zero}}, rounds=0, watch=(), foretold=())

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    def _blank(self) -> dict:
        return {label: {"status": "not run", "variant": self.spec(label)} for label in self.variants}

    def job(self, work: str, labels, **more) -> dict:
        """What a group of ranks is asked to do with these variants."""
        return {
            "work": work,
            "variants": {label: self.spec(label) for label in labels},
            "warmup": self.warmup,
            "rounds": self.rounds,
            "steps": self.steps,
            "parts": list(self.watch),
            "threads": machine.threads(self.world),
            "limit": self.limit,
            "cap": self.cap,
            **more,
        }


def facts(world: int) -> dict:
    """What only the ranks' side can tell of this machine, for a record's provenance. Waits for the imports."""
    return {"bf16": ranks.leader(accelerator(world)).ready()["bf16"]}


def accelerator(world: int) -> str:
    return "cuda" if machine.tier(world) == "gpu" else "cpu"


def messages(world: int, job: dict, accelerator_name: str | None = None):
    """Yield what a group says; raises RanksError, with the variant that it was at, when the group ends badly."""
    at, good = None, False
    for message in ranks.leader(accelerator_name or accelerator(world)).run(world, job):
        event = message["event"]
        if event == "at":
            at = message["variant"]
        if event == "error":
            raise RanksError(message["kind"], message["message"], at, message["log"])
        if event == "died":
            raise RanksError("died", _obituary(message), at, message["log"])
        if event == "hung":
            text = f"no sign of life for {message['seconds']:g} s: the group was ended (raise `limit` if it only needs longer)"
            raise RanksError("hung", text, at, message["log"])
        good = good or event == "finished"
        yield message
    if not good:
        raise RanksError("failed", "the group ended before its work was done", at)


def call(job: dict, world: int | None = None, accelerator_name: str | None = None) -> list:
    """Run job["call"] = "module:function" with job["arguments"] on every rank; the list of what each returned.

    The function gets rank, world and device beside its arguments (not with work="plain", which joins no group).
    """
    world = world or machine.world_size()
    defaults = {"work": "call", "arguments": {}, "threads": machine.threads(world), "limit": 120, "cap": None}
    values = None
    for message in messages(world, {**defaults, **job}, accelerator_name):
        if message["event"] == "returned":
            values = message["values"]
    return values


class _Run:
    """One run under way: which groups to start, what to do with what they say."""

    def __init__(self, experiment: Experiment, report: Report, path, progress: bool):
        self.experiment, self.report, self.path = experiment, report, path
        labels = len(experiment.variants)
        total = labels * (2 + experiment.rounds) if experiment.rounds else labels
        self.bar = Progress(1 + total, f"{experiment.name}: importing torch and DeepSpeed", show=progress)

    def close(self):
        self.bar.close()
        if self.path:
            with contextlib.suppress(OSError):
                self.report.save(self.path)

    def everything(self):
        experiment = self.experiment
        self.report.provenance.update(facts(experiment.world))
        self.bar.update()
        if experiment.rounds and experiment.isolate:
            for label in experiment.variants:
                self.group("clock", [label], then_watch=True)
            return
        if experiment.rounds:
            while pending := self.pending("times"):
                self.group("clock", pending, then_watch=not experiment.fresh)
        if experiment.fresh:
            for label in self.pending("collectives"):
                self.group("watch", [label])
        else:
            while pending := self.pending("collectives"):
                self.group("watch", pending)

    def pending(self, part: str) -> list[str]:
        """Variants that lack this part and have not failed."""
        return [v.name for v in self.report if v.status in ("not run", "ok") and part not in v.data]

    def group(self, work: str, labels: list[str], **more):
        """One group of ranks; a variant that fails keeps its status, what the others lack is asked for again."""
        try:
            for message in messages(self.experiment.world, self.experiment.job(work, labels, **more)):
                self.take(message)
        except RanksError as error:
            label = error.variant or labels[0]
            data = self.report[label].data
            data.update(status=error.kind, message=str(error), log=error.log)
            for other in labels:  # an unfinished clock starts anew: rounds must pair
                if work == "clock":
                    self.report[other].data.pop("times", None)
            self.bar.note(f"{label}: {error.kind}: {error}")
        if self.path:
            self.report.save(self.path)

    def take(self, message: dict):
        event = message["event"]
        if event == "at":
            self.bar.say(f"{self.experiment.name}: {message['variant']}, {message['doing']}")
            return
        if "variant" not in message:
            return
        data = self.report[message["variant"]].data
        if event == "times":
            data.setdefault("times", []).append(message["steps"])
        elif event == "first":
            data["first_step_seconds"] = message["seconds"]
        elif event == "memory" and message["alone"]:
            data["peak"] = {k: message[k] for k in ("allocated", "reserved")}
        elif event == "watched":
            data.update({k: v for k, v in message.items() if k not in ("event", "variant")})
        if event in ("times", "watched") and data["status"] == "not run":
            data["status"] = "ok"
        self.bar.update(event in ("times", "watched", "first"))


def _obituary(message: dict) -> str:
    code = message["exitcode"]
    if code == -9:
        return (
            f"rank {message['rank']} was killed (SIGKILL), most often by the system for want of memory: "
            "free some, or make the model or the batch smaller"
        )
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return f"rank {message['rank']} died {how}"


def _check_writable(path: Path, report: Report):
    try:
        report.save(path)
    except OSError as error:
        raise ZerolabError(
            f"results cannot be written to {path}: {error.strerror}. "
            "Set ZEROLAB_RESULTS to a folder that you may write to, or run with save=False."
        ) from None


@contextlib.contextmanager
def _one_at_a_time(timing: bool):
    """Refuse a second timed run on this machine: two would slow each other and both be wrong. Counting runs may share."""
    if not timing or os.environ.get("ZEROLAB_LOCK") == "off":
        yield
        return
    lock = Path(tempfile.gettempdir()) / f"zerolab-{os.getuid()}.lock"
    with open(lock, "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise ZerolabError(
                f"another timed run is under way on this machine (process {handle.read().strip() or 'unknown'}): "
                "wait for it or stop it, two at once would both measure wrongly"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
