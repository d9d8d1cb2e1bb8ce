"""The one place where the course touches the wire: DeepSpeed's backend object, `deepspeed.comm.comm.cdb`.

`Wire.attach()` replaces its collectives by recording ones, `detach()` removes them without a trace: a clock pass runs
DeepSpeed's own methods. With an emulated wire, a collective's completion is delayed as if all transfers shared one link; hooks,
order and handles stay DeepSpeed's.
"""

from __future__ import annotations

import time

from zerolab.trace import Collective

# method of the backend object: (our name, its parameters in order; the first one named here with a * is what counts)
METHODS = {
    "all_gather_into_tensor": ("all_gather", "*output_tensor input_tensor group async_op"),
    "all_gather_base": ("all_gather", "*output_tensor input_tensor group async_op"),
    "all_gather": ("all_gather", "*tensor_list tensor group async_op"),
    "reduce_scatter_tensor": ("reduce_scatter", "output_tensor *input_tensor op group async_op"),
    "all_reduce": ("all_reduce", "*tensor op group async_op"),
    "inference_all_reduce": ("all_reduce", "*tensor op group"),
    "broadcast": ("broadcast", "*tensor src group async_op"),
    "reduce": ("reduce", "*tensor dst op group async_op"),
    "all_to_all_single": ("all_to_all", "*output input output_split_sizes input_split_sizes group async_op"),
}


class EmulatedWork:
    """A handle that is not done before `done` (a `time.perf_counter` value), whatever the real transport did."""

    def __init__(self, work, done):
        self.work, self.done = work, done

    def wait(self, *args, **kwargs):
        result = self.work.wait(*args, **kwargs) if self.work is not None else None
        left = self.done - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return result

    def is_completed(self):
        return time.perf_counter() >= self.done


class RecordedWork:
    """A handle that notes when it was waited for."""

    def __init__(self, work, finish):
        self.work, self.finish = work, finish

    def wait(self, *args, **kwargs):
        result = self.work.wait(*args, **kwargs)
        self.finish()
        return result

    def is_completed(self):
        return self.work.is_completed()


class Wire:
    """Records collectives, and emulates a link where `emulate` is given.

    emulate: {"latency": s, "bandwidth": bytes/s, "gather_sync": bool, "reduce_async": bool}: each transfer takes latency + ring
    bytes / bandwidth, one after another on one link. gather_sync waits for every all-gather where it is issued, which DeepSpeed
    never does. reduce_async lets a reduce-scatter return at once and be waited for at the end of backward, as on a GPU with
    `overlap_comm` (`settle()`).
    """

    def __init__(self, world: int, emulate: dict | None = None):
        import deepspeed.comm.comm as comm

        self.backend, self.world, self.emulate = comm.cdb, world, emulate
        self.free = 0.0  # when the emulated link is free again
        self.lanes: list[tuple[str, float, float]] = []  # the emulated link's own book: (op, start, end)
        self.begin()

    def begin(self):
        """Start a new optimizer step."""
        self.records: list[list] = []
        self.asynchronous: list[bool] = []  # of each record: whether DeepSpeed asked for a handle instead of waiting
        self.lanes = []
        self.zero, self.phase, self.micro = time.perf_counter(), "forward", 0

    def collectives(self) -> list[Collective]:
        return [Collective(*r) for r in self.records]

    def attach(self):
        for method, (op, parameters) in METHODS.items():
            original = getattr(type(self.backend), method, None)
            if original is not None:
                setattr(self.backend, method, self._wrapped(original.__get__(self.backend), op, parameters.split()))

    def detach(self):
        for method in METHODS:
            self.backend.__dict__.pop(method, None)

    def settle(self):
        """Wait until the emulated link is idle: what a stream synchronisation at the end of backward does."""
        left = self.free - time.perf_counter()
        if self.emulate and left > 0:
            time.sleep(left)

    def _wrapped(self, call, op, parameters):
        names = [name.lstrip("*") for name in parameters]
        argument = next(name.lstrip("*") for name in parameters if name.startswith("*"))

        def collective(*args, **kwargs):
            given = dict(zip(names, args)) | kwargs
            tensors = given[argument] if isinstance(given[argument], (list, tuple)) else [given[argument]]
            elements = sum(t.numel() for t in tensors)
            size = elements * tensors[0].element_size()
            record = [op, elements, size, self.phase, self.micro, time.perf_counter() - self.zero, None]
            self.records.append(record)

            def finish():
                if record[6] is None:
                    record[6] = time.perf_counter() - self.zero

            work = call(*args, **kwargs)
            asynchronous = bool(given.get("async_op"))
            self.asynchronous.append(asynchronous)
            if self.emulate and elements > 1:
                work = self._delay(work, op, size, asynchronous)
            if asynchronous and work is not None:
                return RecordedWork(work, finish)
            finish()
            return work

        return collective

    def _delay(self, work, op, size, asynchronous):
        share = (2 if op == "all_reduce" else 1) * (self.world - 1) / self.world
        start = max(time.perf_counter(), self.free)
        self.free = start + self.emulate["latency"] + size * share / self.emulate["bandwidth"]
        self.lanes.append((op, start - self.zero, self.free - self.zero))
        emulated = EmulatedWork(work, self.free)
        if asynchronous:
            if op == "all_gather" and self.emulate.get("gather_sync"):
                emulated.wait()
            return emulated
        if not (op == "reduce_scatter" and self.emulate.get("reduce_async")):
            emulated.wait()
        return work
