"""How gradients leave a rank: the buckets of ZeRO-3's reduction, and the optimizer's sub-groups.

Source: deepspeed/runtime/zero/stage3.py (reduce_independent_p_g_buckets_and_remove_grads, __add_grad_to_ipg_bucket,
__reduce_and_partition_ipg_grads, _create_fp16_sub_groups) and deepspeed/runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable

from .coordinator import Unpredictable


def padded(elements: int, world: int) -> int:
    """Elements of a tensor after padding to a multiple of the world size."""
    return -(-elements // world) * world


class Bucket:
    """The gradient bucket of one micro-step. reduce(params): called for every reduction, parameters in order of arrival."""

    def __init__(self, numel: list[int], size: int, reduce: Callable):
        self.numel, self.size, self.reduce = numel, size, reduce
        self.params: list[int] = []
        self.elements = 0

    def add(self, param: int) -> None:
        """A gradient is ready. It goes into the bucket unless it would overflow it; alone it may be larger than the bucket."""
        if self.elements and self.elements + self.numel[param] > self.size:
            if param in self.params:
                raise Unpredictable(
                    "DeepSpeed fails: a parameter's gradient comes twice in one backward (a weight used twice under reentrant "
                    "checkpointing), and the bucket that held the first was flushed by the second ('NoneType' has no attribute 'numel')"
                )
            self.flush()
        self.params.append(param)
        self.elements += self.numel[param]

    def flush(self) -> None:
        if len(set(self.params)) < len(self.params):
            raise Unpredictable(
                "DeepSpeed fails: a parameter's gradient comes twice in one backward (a weight used twice under reentrant "
                "checkpointing), and both are in one bucket (AssertionError in __reduce_and_partition_ipg_grads)"
            )
        if self.params:
            self.reduce(self.params)
        self.params, self.elements = [], 0


def sub_groups(shards: list[int], size: int) -> list[int]:
    """Number of parameters in each optimizer sub-group. shards: elements of each parameter's partition, in optimizer order."""
    if size >= sum(shards):
        return [len(shards)]
    counts, count, elements = [], 0, 0
    for i, shard in enumerate(shards):
        count += 1
        elements += shard
        if elements >= size or i == len(shards) - 1:
            counts.append(count)
            count = elements = 0
    return counts
