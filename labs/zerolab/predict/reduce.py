"""How gradients leave a rank: the buckets of ZeRO-3's reduction, and the optimizer's sub-groups.

Source: deepspeed/runtime/zero/stage3.py (reduce_independent_p_g_buckets_and_remove_grads, __add_grad_to_ipg_bucket,
__reduce_and_partition_ipg_grads, _create_fp16_sub_groups) and deepspeed/runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable

from .coordinator import Unpredictable


class Bucket:
    """The gradient bucket of one micro-step. reduce(params): called for every reduction, parameters in order of arrival; returns
    the elements that it needs beside them.

    loose: elements of gradients that wait where autograd put them, since they do not fit (or `contiguous` is off); high: the most of
    them, and of a reduction's own, since somebody set it to `loose`.
    """

    def __init__(self, numel: list[int], size: int, contiguous: bool, reduce: Callable):
        self.numel, self.size, self.contiguous, self.reduce = numel, size, contiguous, reduce
        self.params: list[int] = []
        self.elements = self.loose = self.high = 0

    def add(self, param: int) -> None:
        """A gradient is ready. It goes into the bucket unless it would overflow it; alone it may be larger than the bucket."""
        if self.elements and self.elements + self.numel[param] > self.size:
            if param in self.params:
                raise Unpredictable(
                    "DeepSpeed fails: a parameter's gradient comes twice in one backward (a weight used twice under reentrant "
                    "checkpointing), and the bucket that held the first was flushed by the second ('NoneType' has no attribute 'numel')"
                )
            self.flush(beside=self.numel[param])
        self.params.append(param)
        if not self.contiguous or self.elements + self.numel[param] > self.size:
            self.loose += self.numel[param]
        self.high = max(self.high, self.loose + self.numel[param])
        self.elements += self.numel[param]

    def flush(self, beside: int = 0) -> None:
        """Reduce what is there. beside: elements of a gradient that waits for its place."""
        if len(set(self.params)) < len(self.params):
            raise Unpredictable(
                "DeepSpeed fails: a parameter's gradient comes twice in one backward (a weight used twice under reentrant "
                "checkpointing), and both are in one bucket (AssertionError in __reduce_and_partition_ipg_grads)"
            )
        if self.params:
            self.high = max(self.high, self.loose + beside + self.reduce(self.params))
        self.params, self.elements, self.loose = [], 0, 0


def sub_groups(shards: list[int], size: int) -> list[int]:
    """Elements of each optimizer sub-group. shards: elements of each parameter's partition, in optimizer order."""
    if size >= sum(shards):
        return [sum(shards)]
    groups, elements = [], 0
    for i, shard in enumerate(shards):
        elements += shard
        if elements >= size or i == len(shards) - 1:
            groups.append(elements)
            elements = 0
    return groups
