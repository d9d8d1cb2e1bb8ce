"""One variant as one rank holds it: the DeepSpeed engine, unmodified, and one optimizer step of it."""

from __future__ import annotations

import contextlib
import gc
import importlib


def ds_config(variant: dict) -> dict:
    """The ds_config that a variant means: the course's plain sections around its `zero_optimization`.

    AdamW is torch's unless the optimizer is offloaded (then DeepSpeed's own choice, DeepSpeedCPUAdam); a variant's "ds_config"
    replaces any section.
    """
    zero = {"stage": 3, **variant["zero"]}
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    adam = {"lr": 1e-4} if offloaded else {"lr": 1e-4, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": variant["micro_batch"],
        "gradient_accumulation_steps": variant["accumulation"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **variant.get("ds_config", {}),
    }


def factory(model: dict):
    """The callable that a model spec names, and its keyword arguments."""
    arguments = dict(model)
    module, _, name = arguments.pop("factory", "zerolab.model:build").partition(":")
    return getattr(importlib.import_module(module), name), arguments


class Engine:
    """model + config → engine. `step(mark)` runs one optimizer step and calls mark(phase, micro) as each phase begins.

    Raises whatever DeepSpeed raises: pydantic's ValidationError for a rejected config, RuntimeError when memory runs out.
    """

    def __init__(self, variant: dict, rank: int, device: str):
        import deepspeed
        import torch

        self.variant, self.config = variant, ds_config(variant)
        torch.manual_seed(0)
        build, arguments = factory(variant["model"])
        self.threads = variant.get("threads") or torch.get_num_threads()
        stage3 = self.config["zero_optimization"]["stage"] == 3
        # zero.Init replaces linear() for the whole process and for good; engines of one group each get what their config asks for.
        torch.nn.functional.linear = getattr(deepspeed.zero.Init, "linear_bk", torch.nn.functional.linear)
        context = deepspeed.zero.Init(config_dict_or_path=self.config) if stage3 else contextlib.nullcontext()
        with context:
            self.module = build(**arguments)
        self.linear = torch.nn.functional.linear
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.batches = [
            self.module.batch(variant["micro_batch"], variant["seq"], device, seed=1000 * rank + micro)
            for micro in range(variant["accumulation"])
        ]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.module, model_parameters=trainable, config=self.config
        )
        self.loss = None

    @property
    def parameters(self) -> list:
        return list(self.module.parameters())

    @property
    def coordinator(self):
        """DeepSpeed's PartitionedParameterCoordinator, None below stage 3."""
        offload = getattr(self.optimizer, "parameter_offload", None)
        return offload.get_param_coordinator() if offload else None

    def step(self, mark=lambda phase, micro: None, settle=None):
        import torch

        torch.set_num_threads(self.threads)  # engines of one group may differ in it
        torch.nn.functional.linear = self.linear
        for micro, batch in enumerate(self.batches):
            mark("forward", micro)
            loss = self.engine(*batch)
            mark("backward", micro)
            self.engine.backward(loss)
            if settle:
                settle()
            mark("step", micro)
            self.engine.step()
        self.loss = loss.detach()

    def destroy(self):
        self.engine.destroy()
        self.engine = self.optimizer = self.module = self.batches = None
        gc.collect()
