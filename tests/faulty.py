"""Models that go wrong on purpose, for the fault tests: a factory by the protocol of zerolab.ranks.engine."""

import os
import time


def build(kind: str, at: int = 2, rank: int = 1):
    """The tiny decoder, which at its `at`-th forward on one rank hangs, kills itself, raises, or asks for too much memory."""
    import torch

    from zerolab import model

    module = model.build("tiny", layers=1)
    count = {"forward": 0}

    def misbehave(*_):
        count["forward"] += 1
        if count["forward"] != at or int(os.environ["RANK"]) != rank:
            return
        if kind == "hang":
            time.sleep(3600)
        if kind == "kill":
            os.kill(os.getpid(), 9)
        if kind == "raise":
            raise ArithmeticError("the model's own mistake")
        if kind == "memory":
            torch.empty(1 << 50)

    module.register_forward_pre_hook(misbehave)
    return module
