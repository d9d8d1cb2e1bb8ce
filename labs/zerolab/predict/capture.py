"""Run a model once, on the `meta` device, and write down what DeepSpeed's ZeRO-3 hooks would see.

The hooks below are those of `DeepSpeedZeRoOffload._register_deepspeed_module` (deepspeed/runtime/zero/parameter_offload.py):
same order of registration, the same two autograd functions around a module's outputs and inputs, the same counters. Only what
they do is different: they append an event to a list. So whatever decides the order in DeepSpeed (autograd's own scheduling,
torch.utils.checkpoint, a module used twice, an input that needs no gradient) decides it here too.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from . import moduletrace as mt
from .coordinator import Unpredictable
from .meter import Meter, fused_attention

NUMBER = "_zerolab_number"  # a parameter's place in zero.Init's numbering
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def capture(model: nn.Module, batch, loss: Callable | None = None, linear: bool = True) -> mt.ModuleTrace:
    """One forward and backward of `model`, as events.

    model: on the meta device if it is large; nothing is computed there. Left as it was found, its gradients cleared.
    batch: tuple of positional arguments, mapping of keyword arguments, or a function that returns either.
    loss: makes a scalar of the model's output; by default the output itself, or its `.loss`.
    linear: DeepSpeed's `memory_efficient_linear` (its default).

    Build the model inside `numbered()` where the real one is built under `deepspeed.zero.Init`.
    Cost: about 0.3 ms a module. Raises ValueError if the loss needs no gradient, Unpredictable if the model's code asks for values.
    """
    batch = batch() if callable(batch) else batch
    recorder = _Recorder(model)
    meter = recorder.meter
    meter.ignore(t for t in (batch.values() if isinstance(batch, Mapping) else batch) if torch.is_tensor(t))
    with ExitStack() as stack:
        stack.enter_context(_hooks(model, recorder))
        stack.enter_context(_watched_parameters(model, recorder))
        stack.enter_context(_plain_batch())
        stack.enter_context(fused_attention(meter))
        stack.enter_context(meter)
        if linear:
            stack.enter_context(_memory_efficient_linear(recorder))
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        recorder.in_forward = False
        value = loss(output) if loss else getattr(output, "loss", output)
        if not (torch.is_tensor(value) and value.requires_grad):
            raise ValueError("the loss needs no gradient: nothing is trainable, or every checkpoint input is without gradient")
        recorder.turn()
        value.backward()
        meter.cut()
    for parameter in model.parameters():
        parameter.grad = None
    return recorder.result(linear)


@contextmanager
def numbered():
    """Stands for `with deepspeed.zero.Init()`: numbers parameters as it does, whenever a module's outermost constructor returns.

    Parameters born outside get their numbers later, in `model.parameters()` order, as `deepspeed.initialize` gives them. The number
    decides the order of parameters within a module, which matters if one of them is shared with another module.
    (InsertPostInitMethodToModuleSubClasses in deepspeed/runtime/zero/partition_parameters.py)
    """
    count, building, wrapped = itertools.count(), set(), {}

    def after(init):
        @functools.wraps(init)
        def wrapper(module, *args, **kwargs):
            outermost = id(module) not in building
            building.add(id(module))
            try:
                init(module, *args, **kwargs)
            finally:
                if outermost:
                    building.discard(id(module))
            if outermost and not _paused:
                for parameter in module.parameters(recurse=False):
                    if not hasattr(parameter, NUMBER):
                        setattr(parameter, NUMBER, next(count))

        return wrapper

    def wrap(cls, **_):
        if "__init__" in cls.__dict__ and cls not in wrapped:
            wrapped[cls] = cls.__init__
            cls.__init__ = after(cls.__init__)

    classes = [nn.Module]
    while classes:
        cls = classes.pop()
        wrap(cls) if cls is not nn.Module else None
        classes += [c for c in cls.__subclasses__() if c not in wrapped]
    nn.Module.__init_subclass__ = classmethod(wrap)
    try:
        yield
    finally:
        del nn.Module.__init_subclass__
        for cls, init in wrapped.items():
            cls.__init__ = init


_paused = 0


@contextmanager
def outside():
    """Inside `numbered()`: what is built here is built after zero.Init, as peft's adapters are; it keeps its own type."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


@contextmanager
def _plain_batch():
    """transformers asks its input whether sequences are packed or padded, which meta tensors cannot answer: say that they are not."""
    ask = torch.Tensor.__bool__

    def answer(tensor):
        if tensor.is_meta:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking == "transformers.masking_utils":
                return True  # "all the same sequence", "nothing masked"
            raise Unpredictable(f"{asking} decides by the values of a tensor, which a model on the meta device does not have")
        return ask(tensor)

    torch.Tensor.__bool__ = answer
    try:
        yield
    finally:
        torch.Tensor.__bool__ = ask


class _Recorder:
    """Numbers of parameters and modules, and the events so far."""

    def __init__(self, model: nn.Module):
        self.forward: list[list] = []
        self.backward: list[list] = []
        self.events = self.forward
        self.stack: list[nn.Module] = [model]  # FWD_MODULE_STACK
        self.in_forward = True
        self.refused: dict[str, None] = {}
        self.meter = Meter()
        self.meter.ignore([*model.parameters(), *model.buffers()])
        self.names = {p: name for name, p in model.named_parameters()}
        self.modules: list[mt.Module] = []
        self.module_id: dict[nn.Module, int] = {}
        ordered = sorted(self.names, key=lambda p: getattr(p, NUMBER, math.inf))  # stable: the unnumbered stay in module order
        self.parameter_id = {p: i for i, p in enumerate(ordered)}
        self.owned: list[frozenset[nn.Parameter]] = []
        for name, module in model.named_modules():
            self.module_id[module] = len(self.modules)
            own = list(module.parameters(recurse=False))
            if getattr(module, "_z3_leaf", False):
                self.refused[f"{name} is marked as a leaf module, fetched whole by whichever autograd thread comes first"] = None
            cls = f"{type(module).__module__}.{type(module).__qualname__}"
            self.modules.append(mt.Module(name, cls, [self.parameter_id[p] for p in own]))
            self.owned.append(frozenset(own))

    def event(self, *event) -> None:
        self.events.append([*event])
        self.meter.cut()

    def turn(self) -> None:
        """Forward is over, backward begins."""
        self.meter.cut()
        self.events = self.backward
        self.forward_spans, self.meter.spans = self.meter.spans, []

    def module(self, kind: str, module: nn.Module) -> None:
        self.event(kind, self.module_id[module])

    def parameter(self, kind: str, parameter: nn.Parameter) -> None:
        self.event(kind, self.parameter_id[parameter])

    def gradient(self, parameter: nn.Parameter) -> None:
        """The optimizer's hook: what becomes of the gradient's memory is the bucket's business, so drop it here."""
        self.events.append([mt.GRADIENT, self.parameter_id[parameter]])
        parameter.grad = None
        self.meter.cut()

    def access(self, parameter: nn.Parameter) -> None:
        """ZeROOrderedDict.__getitem__: a parameter read in forward outside its own module is gathered and registered there."""
        if self.in_forward and not any(parameter in self.owned[self.module_id[m]] for m in self.stack):
            self.event(mt.ACCESS, self.module_id[self.stack[-1]], self.parameter_id[parameter])

    def result(self, linear: bool) -> mt.ModuleTrace:
        born = {p: hasattr(p, NUMBER) for p in self.parameter_id}
        parameters = [
            mt.Parameter(self.names[p], p.numel(), p.requires_grad, None if inside or not any(born.values()) else DTYPES[p.dtype])
            for p, inside in born.items()
        ]
        order = [self.parameter_id[p] for p in self.names]
        return mt.ModuleTrace(
            parameters, order, self.modules, self.forward, self.backward, linear, list(self.refused), self.forward_spans, self.meter.spans
        )


@contextmanager
def _hooks(model: nn.Module, recorder: _Recorder):
    """DeepSpeed's hooks on every module, children first, and on every trainable parameter."""
    handles = []
    counters: dict[nn.Module, _Counters] = {}

    def register(module: nn.Module) -> None:
        for child in module.children():  # a child of two parents gets its hooks twice, as in DeepSpeed
            register(child)
        counter = counters.setdefault(module, _Counters(module, recorder))
        handles.append(module.register_forward_pre_hook(counter.pre_forward))
        handles.append(module.register_forward_hook(counter.post_forward))
        handles.append(module.register_forward_hook(counter.wrap_outputs))
        handles.append(module.register_forward_pre_hook(counter.wrap_inputs))

    register(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(recorder.gradient))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counters:
    """The hooks of one module, with DeepSpeed's `ds_grads_remaining`."""

    def __init__(self, module: nn.Module, recorder: _Recorder):
        self.module, self.recorder = module, recorder
        self.grads_remaining = 0

    def pre_forward(self, module, *args) -> None:
        self.recorder.stack.append(module)
        recompute = torch._C._current_graph_task_id() != -1
        self.recorder.module(mt.RECOMPUTE if recompute else mt.PRE_FORWARD, module)

    def post_forward(self, module, inputs, output) -> None:
        self.recorder.stack.pop()
        for item in _shallow_tensors(output):
            if isinstance(item, nn.Parameter):
                name = self.recorder.modules[self.recorder.module_id[module]].name
                self.recorder.refused[f"a module returns one of its parameters: {name}"] = None
        self.recorder.module(mt.POST_FORWARD, module)

    def wrap_outputs(self, module, inputs, output):
        return _each_tensor(partial(_PreBackward.apply, self), output)

    def wrap_inputs(self, module, inputs):
        self.grads_remaining = 0
        return _each_tensor(partial(_PostBackward.apply, self), inputs)


class _PreBackward(torch.autograd.Function):
    """PreBackwardFunctionForModule: once for each output tensor."""

    @staticmethod
    def forward(counters, output):
        return output.detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.counters = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        # DeepSpeed's reference count (applied_pre_backward_ref_cnt) never stops a call: each node counted itself when it was made.
        ctx.counters.recorder.module(mt.PRE_BACKWARD, ctx.counters.module)
        return None, *grads


class _PostBackward(torch.autograd.Function):
    """PostBackwardFunctionModule: the module's backward is over when the last of its inputs has its gradient."""

    @staticmethod
    def forward(counters, value):
        return value.detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.counters, value = inputs
        if value.requires_grad:
            ctx.counters.grads_remaining += 1

    @staticmethod
    def backward(ctx, *grads):
        ctx.counters.grads_remaining -= 1
        if ctx.counters.grads_remaining == 0:
            ctx.counters.recorder.module(mt.POST_BACKWARD, ctx.counters.module)
        return None, *grads


def _each_tensor(function, value):
    """apply_to_tensors_only (deepspeed/runtime/zero/utils.py): rebuild containers, dicts in place, leave the rest."""
    if isinstance(value, (tuple, list)):
        items = [_each_tensor(function, v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key in value.keys():
            value[key] = _each_tensor(function, value[key])
        return value
    return function(value) if isinstance(value, torch.Tensor) else value


def _shallow_tensors(output) -> list:
    """The tensors of an output as DeepSpeed's post-forward hook looks for returned parameters."""
    if output is None or torch.is_tensor(output):
        return [output]
    if isinstance(output, (list, tuple)):
        return list(output)
    return list(output.values()) if isinstance(output, dict) else list(vars(output).values())


class _WatchedDict(dict):
    """Stands for ZeROOrderedDict: tells the recorder about each read of a parameter."""

    recorder: _Recorder

    def __getitem__(self, key):
        parameter = super().__getitem__(key)
        if parameter is not None:
            self.recorder.access(parameter)
        return parameter


@contextmanager
def _watched_parameters(model: nn.Module, recorder: _Recorder):
    originals = [(module, module._parameters) for module in model.modules()]
    for module, parameters in originals:
        module._parameters = watched = _WatchedDict(parameters)
        watched.recorder = recorder
    try:
        yield
    finally:
        for module, parameters in originals:
            module._parameters = parameters


@contextmanager
def _memory_efficient_linear(recorder: _Recorder):
    """zero.Init replaces torch.nn.functional.linear for good: another graph, other saved tensors, and a weight read in backward."""

    class Linear(torch.autograd.Function):
        """LinearFunctionForZeroStage3 (deepspeed/runtime/zero/linear.py): it saves input, weight and bias, always."""

        @staticmethod
        def forward(input, weight, bias=None):
            if input.dim() == 2 and bias is not None:
                return torch.addmm(bias, input, weight.t())
            output = input.matmul(weight.t())
            if bias is not None:
                output += bias
            return output

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None)

        @staticmethod
        def backward(ctx, grad):
            input, weight, bias = ctx.saved_tensors
            if weight in recorder.parameter_id:
                recorder.parameter(mt.LINEAR, weight)
            grad_input = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                grad_input = grad.matmul(weight)
            if ctx.needs_input_grad[1]:
                flat = [t.reshape(-1, t.shape[-1]) for t in (grad, input)]
                grad_weight = flat[0].t().matmul(flat[1])
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
            return grad_input, grad_weight, grad_bias

    original = nn.functional.linear
    nn.functional.linear = lambda input, weight, bias=None: Linear.apply(input, weight, bias)
    try:
        yield
    finally:
        nn.functional.linear = original
