"""The arithmetic of the ZeRO paper: what each stage keeps and receives, before anything has run.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054), sections 5 and 7:
mixed precision with Adam, 16-bit weights and gradients, and an fp32 copy, m and v in the optimizer.
"""

from __future__ import annotations

WEIGHTS, GRADIENTS, OPTIMIZER = 2, 2, 12  # bytes for each element


def states(stage: int, world: int, trainable: float = 1.0) -> dict[str, float]:
    """{part: bytes on each rank for one element of the model} while gradients are alive.

    stage: 0 to 3; world: ranks; trainable: the share of the elements that have gradients (1 in full fine-tuning).
    """
    return {
        "weights": WEIGHTS / (world if stage >= 3 else 1),
        "gradients": GRADIENTS * trainable / (world if stage >= 2 else 1),
        "optimizer": OPTIMIZER * trainable / (world if stage >= 1 else 1),
    }


def received(stage: int, world: int, accumulation: int = 1, trainable: float = 1.0, reduce_to_owner: bool = False) -> float:
    """Elements that each rank receives in an optimizer step, over the model's elements, with ring algorithms.

    Stage 0 all-reduces the gradient once. Stages 1 and 2 all-reduce it too in DeepSpeed, stage 2 after each micro-step, and gather
    the new weights once; the paper's own stages 1 and 2 send each gradient only to its owner (`reduce_to_owner`). Stage 3
    gathers the weights twice and reduce-scatters the gradient, in each micro-step.
    """
    part = (world - 1) / world  # of a reduce or a gather; an all-reduce is both
    reduction = (1 if reduce_to_owner else 2) * part * trainable
    if stage == 0:
        return 2 * part * trainable
    if stage == 1:
        return reduction + part * trainable
    if stage == 2:
        return accumulation * reduction + part * trainable
    return accumulation * (2 + trainable) * part
