"""Functions that the tests run on every rank."""


def identity(rank, world, device, word):
    return [word, rank, world, device]


def variants(rank, world, device, variants):
    return {label: {} for label in variants}


def operators(work) -> list[str]:
    """The operators that torch sees while `work` runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as session:
        work()
    return [e.name() for e in session.profiler.kineto_results.events() if e.name().startswith("aten::")]


def conversions(rank, world, device):
    """How many tensors are converted for one product of bf16 matrices."""
    import torch

    a = torch.ones(8, 8, dtype=torch.bfloat16)
    return operators(lambda: a @ a).count("aten::_to_copy")
