"""What a ZeRO-3 config will do, worked out without running it.

`capture` (needs torch, in `zerolab.predict.capture`) writes down how a model runs; `schedule` says which collectives follow.
"""

from .coordinator import Unpredictable
from .moduletrace import ModuleTrace
from .schedule import schedule
from .steps import Schedule, Step

__all__ = ["ModuleTrace", "Schedule", "Step", "Unpredictable", "schedule"]
