"""Measure, watch and predict what DeepSpeed ZeRO-3 does with a config. Start with `Experiment`."""

from zerolab.experiment import Experiment, ZerolabError
from zerolab.machine import tier_line
from zerolab.report import Report, compare, load, recorded

__version__ = "0.1.0"
__all__ = ["Experiment", "Report", "ZerolabError", "compare", "load", "recorded", "tier_line"]
