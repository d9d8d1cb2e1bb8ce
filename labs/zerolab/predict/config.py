"""Which configs the prediction follows, with every missing key at the installed DeepSpeed's default."""

from __future__ import annotations

from collections.abc import Mapping

from zerolab import knobs

from .coordinator import Unpredictable
from .moduletrace import ModuleTrace

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Keys of zero_optimization that change the schedule in ways that are not followed: {key: (accepted values, why not)}.
REFUSED = {
    "stage": ((3,), "only stage 3 partitions parameters"),
    "stage3_module_granularity_threshold": (
        (0,),
        "it makes leaf modules, fetched whole by whichever autograd thread comes first",
    ),
    "leaf_module": ((None, {}), "leaf modules are fetched whole by whichever autograd thread comes first"),
    "zero_hpz_partition_size": ((0, 1), "a second partition inside the node changes the group and size of every gather"),
    "zero_quantized_weights": ((False,), "gathers carry int8 and their scales"),
    "zero_quantized_nontrainable_weights": ((False,), "gathers carry int8 and their scales"),
    "zero_quantized_gradients": ((False,), "gradients are reduced by all-to-all"),
    "zenflow": ((None,), "ZenFlow updates selected gradient columns by its own collectives"),
}
# Sections beside zero_optimization that do so too.
REFUSED_SECTIONS = {
    "torch_autocast": "each parameter may be gathered in a type of its own",
    "compile": "DeepCompile replaces the coordinator by a compiled graph",
    "tensor_parallel": "parameters are first cut between tensor-parallel ranks",
    "sequence_parallel_size": "gradients are averaged over other groups of ranks",
    "expert_parallel": "experts are partitioned over other groups of ranks",
    "pipeline": "a pipeline engine runs the micro-steps",
}
# Old spellings that DeepSpeed still reads.
RENAMED = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
}


def resolve(config: Mapping | None) -> dict:
    """The full `zero_optimization` section under DeepSpeed's key names, every missing key at its default. Raises Unpredictable."""
    z = {"leaf_module": None, "cpu_offload_use_pin_memory": None, **knobs.stage3_defaults()}
    alias = {**knobs.aliases(), **RENAMED}
    for key, value in (config or {}).items():
        name = alias.get(key, key)
        if name not in z:
            raise Unpredictable(f"zero_optimization.{key} is unknown to DeepSpeed {knobs.deepspeed_version()}, which refuses it")
        if key.startswith("cpu_offload") and isinstance(value, bool):
            value = {"device": "cpu"} if value else None
        if value == "auto":
            raise Unpredictable(f"zero_optimization.{key} is 'auto', which only the launcher can resolve")
        z[name] = value
    for key, (accepted, reason) in REFUSED.items():
        if z.get(key) not in accepted:
            raise Unpredictable(f"zero_optimization.{key} = {z[key]!r} is not followed: {reason}")
    for key in ("offload_param", "offload_optimizer"):
        section = z[key] or {}
        device = section.get("device") or "none"
        if device == "nvme":
            raise Unpredictable(f"{key} to nvme is not followed: what is prefetched depends on free swap buffers")
        if section.get("super_offload"):
            raise Unpredictable("super_offload is not followed: it keeps gradient buckets of its own")
        z[key] = None if device == "none" else {**knobs.offload_defaults()[key], **section}
    return z


def check(trace: ModuleTrace, z: Mapping, world: int, dtypes: tuple[str, ...]) -> None:
    """Raises Unpredictable or ValueError when model, config and world do not go together."""
    if world < 1:
        raise ValueError("world must be at least 1")
    unknown = [d for d in dtypes if d not in BYTES]
    if unknown:
        raise ValueError(f"dtype must be one of {', '.join(BYTES)}, not {unknown[0]!r}")
    if trace.refused:
        raise Unpredictable(f"this model is not followed: {trace.refused[0]}")
    leaf = next((m for m in trace.modules if m.cls in knobs.leaf_classes()), None)
    if leaf:
        raise Unpredictable(f"{leaf.name} ({leaf.cls}) is a leaf module to DeepSpeed: it is fetched whole, whichever experts run")
    if bool(z["memory_efficient_linear"]) != trace.linear:
        raise ValueError(
            f"memory_efficient_linear is {z['memory_efficient_linear']}: capture the model with linear={not trace.linear}"
        )


def arguments(ds_config: Mapping) -> dict:
    """What `schedule` needs of a whole ds_config: config, dtype, communication, accumulation. Raises Unpredictable."""
    for section, reason in REFUSED_SECTIONS.items():
        value = ds_config.get(section)
        idle = value in (None, False, 1, {}) or (
            isinstance(value, Mapping) and value.get("enabled", value.get("deepcompile")) is False
        )
        if not idle:
            raise Unpredictable(f"{section} is not followed: {reason}")

    def enabled(name):
        return (ds_config.get(name) or {}).get("enabled", False) is True

    dtype = "bf16" if enabled("bf16") else "fp16" if enabled("fp16") else "fp32"
    return {
        "config": ds_config.get("zero_optimization"),
        "dtype": dtype,
        "communication": ds_config.get("communication_data_type") or dtype,
        "accumulation": ds_config.get("gradient_accumulation_steps", 1),
    }
