"""Products of bf16 matrices in fp32, for processors that have no instructions for them."""

import pytest
import torch

from on_ranks import operators
from zerolab import Experiment
from zerolab.experiment import call
from zerolab.ranks import bf16


@pytest.fixture(autouse=True)
def installed():
    bf16.install()
    yield
    bf16.remove()


def test_a_product_is_the_fp32_one_rounded_once():
    a, b = torch.randn(3, 5, 700).bfloat16().requires_grad_(), torch.randn(700, 11).bfloat16().requires_grad_()
    out = a @ b
    exact = a.detach().float() @ b.detach().float()
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact.bfloat16())
    out.sum().backward()
    assert torch.equal(b.grad, (a.detach().float().reshape(15, 700).T @ torch.ones(15, 11)).bfloat16())
    whole = torch.randn(4, 6)
    assert torch.equal(whole @ whole.T, torch.mm(whole, whole.T, out=torch.empty(4, 4)))  # other types as before
    assert (whole.double() @ whole.T.double()).dtype == torch.float64


def test_what_is_counted_is_counted_with_torchs_own_kernels():
    a = torch.randn(8, 8).bfloat16()
    with bf16.original():
        own = operators(lambda: a @ a)
    assert own.count("aten::mm") == 1 and "aten::_to_copy" not in own
    assert operators(lambda: a @ a).count("aten::_to_copy") == 3


def test_ranks_multiply_as_the_report_says():
    """Three conversions a product, or none."""
    converted = call({"call": "on_ranks:conversions"}, world=2)
    experiment = Experiment("e", {"a": {}}, function="on_ranks:variants", world=2)
    said = experiment.run(save=False, progress=False).provenance["bf16"]
    assert converted == [3, 3] and said == "fp32" if bf16.wanted() else converted == [0, 0] and said == "native"
