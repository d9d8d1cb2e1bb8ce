"""One variant with everything attached: the collectives of every step, residency, holdings, memory, operators, a timeline."""

from __future__ import annotations

import contextlib
import time

from zerolab.ranks import bf16, probe
from zerolab.ranks.engine import Engine
from zerolab.ranks.wire import Wire


class Watch:
    """One variant, watched from its first step on. Rank 0 tells, so the others carry no probes: they only take part.

    `step()` once for each warm-up step, then `holdings()`, and at last `finish()`, which ends the engine. Between two calls nothing
    is attached.
    """

    def __init__(self, variant: dict, rank: int, world: int, device: str):
        self.kind, self.tells = device.partition(":")[0], rank == 0
        pinned: dict = {}
        with probe.pin_requests(pinned):
            self.engine = engine = Engine(variant, rank, device)
        self.wire = Wire(world, variant.get("wire"))
        self.attached = self.tells or bool(self.wire.emulate)
        self.residency = self.copies = self.traffic = None
        if self.tells and engine.coordinator:
            self.residency, self.copies = probe.Residency(engine), probe.HostCopies(engine)
            self.traffic = probe.OptimizerTraffic(engine)
        self.result: dict = {"collectives": [], "world": world, "pinned": pinned}

    def step(self):
        """One optimizer step: its collectives are kept; of residency, copies and phase borders those of the last step."""
        import torch

        wire, residency, marks = self.wire, self.residency, []

        def mark(phase, micro):
            wire.phase, wire.micro = phase, micro
            marks.append([phase, micro, time.perf_counter() - wire.zero])
            if residency:
                residency.mark(phase, micro)
                self.copies.phase = self.traffic.phase = phase

        if self.attached:
            wire.attach()
        try:
            torch.distributed.barrier()
            wire.begin()
            if residency:
                residency.begin()
                self.copies.begin()
                self.traffic.begin()
                with residency.attached(), self.copies.attached(), self.traffic.attached():
                    self.engine.step(mark, wire.settle)
                    residency.sample()
            else:
                self.engine.step(mark, wire.settle)
        finally:
            wire.detach()
        self.result["collectives"].append([list(c) for c in wire.collectives()])
        self.result["marks"] = marks
        if residency:
            self.result["resident"] = residency.summary()
            self.result["host_copies"] = dict(self.copies.bytes)
            self.result["optimizer_traffic"] = self.traffic.bytes

    def holdings(self):
        """The loss, the model, and what this rank keeps between steps."""
        engine, result = self.engine, self.result
        result["loss"] = float(engine.loss)
        result["model"] = {
            "elements": sum(getattr(p, "ds_numel", p.numel()) for p in engine.parameters),
            "trainable": sum(getattr(p, "ds_numel", p.numel()) for p in engine.parameters if p.requires_grad),
            "tensors": len(engine.parameters),
            "largest": max(getattr(p, "ds_numel", p.numel()) for p in engine.parameters),
        }
        if engine.coordinator:
            persistent = [p.ds_numel for p in engine.parameters if p.ds_persist]
            result["model"].update(persistent_tensors=len(persistent), persistent_elements=sum(persistent))
            result["holdings"] = probe.holdings(engine)
            result["sub_groups"] = len(engine.optimizer.fp16_groups)
            result["tiles"] = [t.numel() for t in engine.optimizer.fp32_partitioned_groups_flat]

    def finish(self, parts) -> dict:
        """The parts that need a step of their own; then the engine ends. Everything that was seen."""
        engine, result = self.engine, self.result
        if "alive" in parts:
            result["alive"] = probe.alive(self.kind)
            result["alive_after_backward"] = alive_after_backward(engine, self.kind, self.tells)
        with bf16.original():
            if "ops" in parts:
                result["ops"] = ops_by_phase(engine, self.kind, self.tells)
            if "memory" in parts:
                result["memory"] = memory_by_phase(engine, self.kind, self.tells)
        if "timeline" in parts:
            result["timeline"] = one_timeline(engine, self.wire, self.kind, self.tells)
        engine.destroy()
        return result


def alive_after_backward(engine, kind: str, tells: bool) -> dict:
    """{dtype: bytes} of every live tensor after a step's first backward: what accumulation holds until the next micro-step."""
    seen: list = []

    def border(phase, micro):
        if phase == "step" and not seen and tells:
            seen.append(probe.alive(kind))

    engine.step(border)
    return seen[0] if tells else {}


def ops_by_phase(engine, kind: str, tells: bool) -> dict:
    """{phase: {operator: calls}} of one step: the ATen operators that torch.profiler sees, without "aten::"."""
    if not tells:
        engine.step()
        return {}
    counts: dict = {"forward": {}, "backward": {}, "step": {}}
    with contextlib.ExitStack() as stack:
        inside: list = []

        def close():
            if inside:
                phase, result, session = inside.pop()
                session.close()
                for event in result["events"]:
                    if event.name().startswith("aten::"):
                        name = event.name().removeprefix("aten::")
                        counts[phase][name] = counts[phase].get(name, 0) + 1

        def border(phase, micro):
            close()
            result: dict = {}
            session = stack.enter_context(contextlib.ExitStack())
            session.enter_context(probe.profiled(kind, result, memory=False))
            inside.append((phase, result, session))

        engine.step(border)
        close()
    return counts


def memory_by_phase(engine, kind: str, tells: bool) -> dict:
    """Bytes: the largest allocation above its start in each phase of one step; on a GPU also the step's absolute peaks."""
    import torch

    peaks = {"forward": 0, "backward": 0, "step": 0}
    if kind == "cuda":
        phases: list = []

        def border(phase, micro):
            torch.cuda.synchronize()
            if phases:
                before, start = phases[-1]
                peaks[before] = max(peaks[before], torch.cuda.max_memory_allocated() - start)
            totals["allocated"] = max(totals["allocated"], torch.cuda.max_memory_allocated())
            phases.append((phase, torch.cuda.memory_allocated()))
            torch.cuda.reset_peak_memory_stats()

        totals = {"allocated": 0}
        rest = torch.cuda.memory_allocated()
        engine.step(border)
        border("end", 0)
        return {**peaks, "rest": rest, "allocated": totals["allocated"], "reserved": torch.cuda.memory_reserved()}

    if not tells:
        engine.step()
        return {}
    sessions: dict = {}

    class Border:
        open = None

        def __call__(self, phase, micro):
            self.close()
            result: dict = {}
            self.open = (phase, probe.profiled(kind, result, memory=True), result)
            self.open[1].__enter__()

        def close(self):
            if self.open:
                phase, session, result = self.open
                session.__exit__(None, None, None)
                sessions.setdefault(phase, []).append(probe.peak_bytes(result["events"]))
                self.open = None

    border = Border()
    engine.step(border)
    border.close()
    return {phase: max(sessions[phase]) for phase in peaks}


def one_timeline(engine, wire, kind: str, tells: bool) -> dict:
    """Lanes of one step from torch.profiler, with the phase borders; the link lane is the emulator's where a wire is emulated."""
    import torch

    result, marks = {}, []
    if wire.emulate:
        wire.attach()
    torch.distributed.barrier()
    wire.begin()

    def mark(phase, micro):
        marks.append([phase, micro, time.perf_counter() - wire.zero])

    try:
        with probe.profiled(kind, result, memory=False):
            engine.step(mark, wire.settle)
            if kind == "cuda":
                torch.cuda.synchronize()
        end = time.perf_counter() - wire.zero
    finally:
        wire.detach()
    if not tells:
        return {}
    lanes = probe.timeline(result["events"], kind)
    if wire.emulate:
        lanes["link"] = [[round(s, 6), round(e, 6)] for _, s, e in wire.lanes]
    return {"lanes": lanes, "marks": marks, "end": end, "emulated": bool(wire.emulate)}
