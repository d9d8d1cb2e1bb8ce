"""What each way to save writes, and what comes back from it: a tiny Qwen2 of transformers, fully trained or with peft's LoRA.

`save` runs on every rank beside a real engine; `load` runs in a process that never saw the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import warnings
from pathlib import Path

import peft
import torch
import transformers

CONFIG = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def qwen2(lora: int = 0, **changes):
    """A Qwen2ForCausalLM with random weights, wrapped by peft where `lora` gives a rank; `forward(ids)` is the loss.

    changes: fields of transformers' Qwen2Config on top of CONFIG. The model that a reader would save is `module.causal`.
    """
    config = transformers.Qwen2Config(**CONFIG | changes)
    causal = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if lora:
        adapter = peft.LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
        causal = peft.get_peft_model(causal, adapter, autocast_adapter_dtype=False)
    return Loss(causal)


class Loss(torch.nn.Module):
    """The course's model protocol around a causal language model."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, ids):
        return self.causal(input_ids=ids, labels=ids, use_cache=False).loss

    def batch(self, micro_batch, seq, device, seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(CONFIG["vocab_size"], (micro_batch, seq), generator=generator).to(device),)


def plain_name(name: str) -> str:
    """A parameter's name as the saved files have it: without our wrapper's and without the adapter's own."""
    return name.removeprefix("causal.").replace(".default.", ".")


def fingerprint(tensor) -> str:
    """Tells two 16-bit tensors apart by shape and every byte."""
    data = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(str(tuple(data.shape)).encode() + data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fingerprints(tensors: dict) -> dict[str, str]:
    return {plain_name(name): fingerprint(tensor) for name, tensor in tensors.items()}


def contents(tensors: dict) -> dict:
    """tensors, elements: how many a state dict holds."""
    found = [t for t in tensors.values() if isinstance(t, torch.Tensor)]
    return {"tensors": len(found), "elements": sum(t.numel() for t in found)}


def sizes(folder: Path) -> dict[str, int]:
    """{relative path: bytes} of the files in a folder."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def save(rank: int, world: int, device: str, variants: dict, folder: str) -> dict:
    """Train each variant two steps, then save it in every way, into FOLDER/VARIANT/WAY.

    Returns on rank 0 {label: {"model", "trained": {tensor: fingerprint}, "trainable": [tensor], "saves": {way: {"returned",
    "collectives": {op: [count, bytes]}, "peak": [bytes above its start, one for each rank], "files", "warned", …}}, "resume"}}.
    """
    from zerolab.ranks.engine import Engine

    found = {}
    for label, variant in variants.items():
        engine = Engine(variant, rank, device)
        for _ in range(2):
            engine.step()
        found[label] = Saver(engine, rank, world, device, Path(folder) / label).everything()
        engine.destroy()
    return found


class Saver:
    """One trained engine and all the ways to save it."""

    def __init__(self, engine, rank, world, device, folder):
        self.engine, self.rank, self.world, self.device, self.folder = engine, rank, world, device, folder
        self.model = engine.module.causal
        self.lora = isinstance(self.model, peft.PeftModel)
        self.saves: dict = {}

    def everything(self) -> dict:
        parameters = self.engine.parameters
        trainable = [plain_name(n) for n, p in self.engine.module.named_parameters() if p.requires_grad]

        self.way("state_dict", lambda at: contents(self.model.state_dict()))
        if self.lora:
            self.way("adapter, as it lies", self.adapter)
            self.way("adapter, transformers 4", lambda at: self.adapter(at, {}))
            self.way("adapter, transformers 5", self.adapter_by_consolidation)
            self.way("adapter, gathered alone", self.adapter_gathered)
            self.way("save_16bit_model, trained only", lambda at: self.sixteen_bit(at, exclude_frozen_parameters=True))
            self.way("save_checkpoint, trained only", lambda at: self.checkpoint(at, exclude_frozen_parameters=True))
        self.way("save_16bit_model", self.sixteen_bit)
        self.way("save_checkpoint", self.checkpoint)
        return {
            "model": {
                "elements": sum(p.ds_numel for p in parameters),
                "trainable": sum(p.ds_numel for p in parameters if p.requires_grad),
                "tensors": len(parameters),
                "largest": max(p.ds_numel for p in parameters),
                "persistent_elements": sum(p.ds_numel for p in parameters if p.ds_persist),
            },
            "world": self.world,
            "trained": self.trained(),
            "trainable": trainable,
            "saves": self.saves,
            "resume": self.resume(),
        }

    def trained(self) -> dict[str, str]:
        """Fingerprints of all weights; last of all, since to gather a persistent weight is to release it afterwards."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        found = {}
        for name, parameter in self.engine.module.named_parameters():
            with GatheredParameters([parameter]):
                found[plain_name(name)] = fingerprint(parameter)
        return found

    def checkpoint(self, at, **options):
        return {"returned": bool(self.engine.engine.save_checkpoint(str(at), **options))}

    def way(self, name: str, save):
        """Run one way to save on every rank; keep what it returned, what it sent, its peak memory and its files."""
        from zerolab.ranks.wire import Wire

        at, peak = self.folder / name, {}
        wire = Wire(self.world)
        torch.distributed.barrier()
        wire.attach()
        try:
            with peak_memory(self.device, peak), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                facts = save(at)
        finally:
            wire.detach()
        peaks: list = [None] * self.world
        torch.distributed.all_gather_object(peaks, peak["bytes"])
        sent: dict = {}
        for c in wire.collectives():
            if c.elements > 1:
                count, size = sent.get(c.op, (0, 0))
                sent[c.op] = [count + 1, size + c.bytes]
        warned = [str(w.message)[:70] for w in caught if issubclass(w.category, peft.utils.warning.PeftWarning)]
        files = sizes(at) if at.exists() else {}
        self.saves[name] = {"collectives": sent, "peak": peaks, "files": files, "warned": warned, **facts}

    def sixteen_bit(self, at, **options):
        return {"returned": self.engine.engine.save_16bit_model(str(at), "pytorch_model.bin", **options)}

    def adapter(self, at, state_dict=None):
        """peft's own save on rank 0. None: as the weights lie on this rank; {}: what transformers 4 falls back to."""
        if self.rank == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                self.model.save_pretrained(str(at), state_dict=state_dict)
        taken = peft.get_peft_model_state_dict(self.model, state_dict=state_dict)
        return contents(taken) | {"empty": sum(t.numel() == 0 for t in taken.values())}

    def adapter_by_consolidation(self, at):
        """What transformers 5's Trainer does: every weight is gathered, the frozen ones are not written."""
        state_dict = self.engine.engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if self.rank:
            return {}
        return self.adapter(at, {name.removeprefix("causal."): tensor for name, tensor in state_dict.items()})

    def adapter_gathered(self, at):
        """Only the adapter's weights are gathered."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([p for p in self.model.parameters() if p.requires_grad]):
            return self.adapter(at)

    def resume(self) -> dict:
        """Train on, load what was saved, and say what came back: from a checkpoint, and from a file of weights alone."""
        engine, before = self.engine.engine, self.state()
        self.engine.step()
        after = self.state()
        weights_only = self.folder / ("adapter, gathered alone" if self.lora else "save_16bit_model")
        weights_only.mkdir(parents=True, exist_ok=True)
        path, _ = engine.load_checkpoint(str(weights_only))
        unchanged = self.state() == after
        whole, _ = engine.load_checkpoint(str(self.folder / "save_checkpoint"))
        return {
            "moved_on": after != before,
            "weights_alone": {"loaded": path is not None, "changed_anything": not unchanged},
            "checkpoint": {"loaded": whole is not None, "as_it_was": self.state() == before},
        }

    def state(self) -> list:
        """Fingerprints of this rank's master weights and Adam states, and the step count."""
        optimizer = self.engine.optimizer
        masters = [fingerprint(t.data) for t in optimizer.fp32_partitioned_groups_flat]
        states = [fingerprint(v) for s in optimizer.optimizer.state.values() for v in s.values() if hasattr(v, "numel") and v.numel() > 1]
        return [masters, states, self.engine.engine.global_steps]


@contextlib.contextmanager
def peak_memory(device: str, found: dict):
    """found["bytes"]: the most memory that was allocated above the start while the block ran."""
    from zerolab.ranks import probe

    if device.startswith("cuda"):
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        found["bytes"] = torch.cuda.max_memory_allocated() - start
        return
    result: dict = {}
    with probe.profiled("cpu", result, memory=True):
        yield
    found["bytes"] = probe.peak_bytes(result["events"])


def load(rank: int, world: int, device: str, variants: dict, folder: str, keep: bool = True) -> dict:
    """Load everything that `save` left, in a process that never saw the model: {label: {"loads": {way: {"tensors", "elements",
    "prints": {tensor: fingerprint}, "failed"}}}}. Files of weights go into a new model of transformers, adapters through peft.
    keep: leave the files where they are.
    """
    found = {}
    for label, variant in variants.items():
        lora = variant["model"].get("lora", 0)
        loads = {}
        for at in sorted(p for p in (Path(folder) / label).iterdir() if p.is_dir()):
            for name, read in (("pytorch_model.bin", whole_model), ("adapter_model.safetensors", adapter), ("latest", sharded)):
                if (at / name).exists():
                    loads[at.name] = attempt(read, at, lora)
        found[label] = {"loads": loads}
    if not keep:
        shutil.rmtree(folder)
    return found


def attempt(read, at: Path, lora: int) -> dict:
    """What a reader's own load would give, or its error in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = read(at, lora)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}", "tensors": 0, "elements": 0, "prints": {}}
    return contents(tensors) | {"prints": fingerprints(tensors)}


def fresh_model(lora: int):
    torch.manual_seed(1)
    return qwen2(lora).causal.to(torch.bfloat16)


def whole_model(at: Path, lora: int) -> dict:
    saved = {n.removeprefix("causal."): t for n, t in torch.load(at / "pytorch_model.bin", weights_only=True).items()}
    model = fresh_model(lora)
    model.load_state_dict(saved, strict=len(saved) == len(model.state_dict()))
    return {n: t for n, t in model.state_dict().items() if n in saved}


def adapter(at: Path, lora: int) -> dict:
    from safetensors.torch import load_file

    written = load_file(at / "adapter_model.safetensors")
    model = peft.PeftModel.from_pretrained(fresh_model(0), str(at)).to(torch.bfloat16)
    return {n: t for n, t in peft.get_peft_model_state_dict(model).items() if n in written}


def sharded(at: Path, lora: int) -> dict:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(at)))
