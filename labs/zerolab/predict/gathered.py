"""Bytes that gathered parameters take on the device. More than their elements: DeepSpeed gathers several into one flat buffer and
copies each out of it, so that for a while both exist.

Source: AllGatherHandle, AllGatherCoalescedHandle, _all_gather_sequential and _all_gather_dtype in
deepspeed/runtime/zero/partition_parameters.py.
"""

from __future__ import annotations


def padded(elements: int, world: int) -> int:
    """Elements of a tensor after padding to a multiple of the world size."""
    return -(-elements // world) * world


class Gathered:
    """now: bytes at present; high: the most since somebody set it to `now`.

    numel, item: elements and bytes per element of each parameter. sequential: `stage3_allgather_sequential`.
    from_host: parameters live on the host (offload_param), so that a rank's shard is first copied to the device.
    """

    def __init__(self, numel: list[int], item: list[int], world: int, sequential: bool, from_host: bool):
        self.bytes = [padded(n, world) * i for n, i in zip(numel, item)]
        self.copied = [n * i for n, i in zip(numel, item)]
        self.world, self.sequential, self.from_host = world, sequential, from_host
        self.own = [0] * len(numel)
        self.now = self.high = 0

    def _add(self, size: int) -> None:
        self.now += size
        self.high = max(self.high, self.now)

    def issued(self, handle) -> None:
        """An all-gather begins: its output exists from here on."""
        handle.references = len(handle.params)
        handle.flat = handle.shards = 0
        if self.world == 1:  # the shard is the parameter: nothing to gather, at most to copy (NoGatherCoalescedHandle)
            for p in handle.params:
                self.alone(p)
            return
        size = sum(self.bytes[p] for p in handle.params)
        if len(handle.params) == 1 or self.sequential:
            for p in handle.params:
                self.own[p] = self.bytes[p]
            handle.shards = size // self.world if self.from_host else 0
            self._add(size + handle.shards)
        else:
            handle.flat = size
            shards = size // self.world if self.from_host else 0
            self._add(size + shards)
            self.now -= shards

    def waited(self, handle) -> None:
        """The all-gather is over: parameters of a flat buffer are copied out of it one by one."""
        if handle.flat:
            for p in handle.params:
                self.own[p] = self.copied[p]
            self._add(sum(self.copied[p] for p in handle.params))
        self.now -= handle.shards

    def forgotten(self, handle) -> None:
        """One of the handle's parameters left the registry of gathers in flight; with the last one goes the flat buffer."""
        handle.references -= 1
        if not handle.references:
            self.now -= handle.flat

    def alone(self, param: int) -> None:
        self.own[param] = self.bytes[param] if self.world > 1 or self.from_host else 0
        self._add(self.own[param])

    def once(self, param: int) -> None:
        """Gathered for one product and freed at once."""
        self._add(self.bytes[param])
        self.now -= self.bytes[param]

    def released(self, param: int) -> None:
        self.now -= self.own[param]
        self.own[param] = 0

    def state(self) -> tuple:
        return self.now, tuple(self.own)

    def restore(self, state: tuple) -> None:
        self.now, self.own = state[0], list(state[1])
        self.high = self.now
