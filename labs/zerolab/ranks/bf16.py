"""Products of bf16 matrices on processors that have no instructions for them.

There torch's own kernels are plain loops (aten/src/ATen/native/cpu/BlasKernel.cpp), slower than fp32 products by far when neither matrix is
transposed, as in every backward pass. In their place the product is taken in fp32 and rounded once, which is what the instructions
do too.
"""

from __future__ import annotations

import contextlib
import warnings

_installed: list = []


def wanted() -> bool:
    """Whether this processor lacks bf16 products that torch could use."""
    import torch

    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def install() -> None:
    """From now on this process multiplies bf16 matrices on the CPU in fp32, until `remove`."""
    import torch

    def mm(a, b):
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32 if a.dtype == torch.bfloat16 else a.dtype)
        # `out=` reaches torch's own kernel: only the functional form is replaced
        return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out).to(a.dtype)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel": yes
        library.impl("mm", mm, "CPU")
    _installed.append(library)


def remove() -> None:
    """Bring torch's own kernels back."""
    while _installed:
        _installed.pop()._destroy()


@contextlib.contextmanager
def original():
    """torch's own kernels inside the block: for counting operators and bytes, which the replacement would add to."""
    installed = bool(_installed)
    remove()
    try:
        yield
    finally:
        if installed:
            install()
