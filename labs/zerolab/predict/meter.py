"""What a model computes and keeps between two of DeepSpeed's hooks: live bytes, floating-point operations, bytes moved.

A dispatch mode watches the operators of one run on the `meta` device. A tensor lives there exactly as long as it would on a GPU,
since the same Python and autograd references hold it; only its contents are missing.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROUND = 512  # the CUDA caching allocator's smallest block (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)


class Meter(TorchDispatchMode):
    """Counts operators while it is active; `cut()` ends a span and begins the next.

    spans: for each span [live bytes at its begin, largest live bytes in it, floating-point operations, bytes read and written,
    operators]. Storages that exist before (parameters, inputs) are not counted.
    """

    def __init__(self):
        super().__init__()
        self.live = 0
        self.known: dict[int, weakref.finalize] = {}
        self.spans: list[list[int]] = []
        self.begin()

    def begin(self) -> None:
        self.start = self.peak = self.live
        self.flops = self.moved = self.operators = 0

    def cut(self) -> None:
        self.spans.append([self.start, self.peak, self.flops, self.moved, self.operators])
        self.begin()

    def ignore(self, tensors) -> None:
        """These tensors are accounted for elsewhere."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage(), 0)

    def _watch(self, storage, size: int) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = weakref.finalize(storage, self._free, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        del self.known[key]
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        for tensor in results:
            storage = tensor.untyped_storage()
            self._watch(storage, math.ceil(storage.nbytes() / ROUND) * ROUND)
        if not func.is_view and results:
            count = flop_registry.get(func._overloadpacket)
            if count:
                self.flops += count(*args, **kwargs, out_val=out)
            inputs = [a for a in args if isinstance(a, torch.Tensor)]
            self.moved += sum(t.numel() * t.element_size() for t in inputs + results)
            self.operators += 1
        return out


class _FusedAttention(torch.autograd.Function):
    """What PyTorch's flash attention keeps and allocates (arXiv:2205.14135): output and log-sum-exp, never the score matrix.

    q: (batch, heads, length, width); k, v: (batch, groups, keys, width).
    """

    @staticmethod
    def forward(ctx, meter, causal, q, k, v):
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.meter, ctx.work = meter, 4 * q.numel() * k.shape[-2] // (2 if causal else 1)
        meter.flops += ctx.work
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        ctx.meter.flops += ctx.work * 5 // 2  # five products instead of two
        accumulated = q.new_empty(q.shape, dtype=torch.float32)
        expanded = [q.new_empty(*k.shape[:1], q.shape[1], *k.shape[2:]) for _ in "kv"] if q.shape[1] != k.shape[1] else []
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del accumulated, expanded
        return None, None, *grads


class fused_attention:
    """While active, `scaled_dot_product_attention` behaves as on a GPU: one fused operator (on `meta` torch would take it apart)."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def __enter__(self):
        self.original = nn.functional.scaled_dot_product_attention

        def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
            return _FusedAttention.apply(self.meter, is_causal, query, key, value)

        nn.functional.scaled_dot_product_attention = attention

    def __exit__(self, *_):
        nn.functional.scaled_dot_product_attention = self.original
