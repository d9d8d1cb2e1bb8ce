"""The wind tunnel: DeepSpeed's schedule depends on ratios of element counts alone.

Divide every width of a model by `scale`, its thresholds alike, and the engine makes the full model's schedule: as many gathers, the
same tensors kept. Matrices shrink by scale², so elements read off are multiplied by scale² (1024 for scale 32).
"""

from __future__ import annotations

from zerolab.knobs import stage3_defaults

# Thresholds that count elements of whole tensors, or of shards: they shrink with the matrices.
MATRIX_KEYS = (
    "reduce_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
)
# This one tells vectors from matrices: it shrinks with the vectors.
VECTOR_KEYS = ("stage3_param_persistence_threshold",)


def shrink(zero: dict, scale: int) -> dict:
    """A `zero_optimization` section for a model whose widths are divided by `scale`, defaults written out and shrunk as well.

    Zero stays zero, nothing else becomes zero; a value that is no number (a mistake of the reader's) is left for DeepSpeed to reject.
    """
    if scale == 1:
        return dict(zero)
    defaults = stage3_defaults()
    shrunk = {key: defaults[key] for key in MATRIX_KEYS + VECTOR_KEYS} | zero
    for keys, factor in ((MATRIX_KEYS, scale * scale), (VECTOR_KEYS, scale)):
        for key in keys:
            if isinstance(shrunk[key], (int, float)) and shrunk[key] > 0:
                shrunk[key] = max(1, int(shrunk[key] // factor))
    return shrunk
