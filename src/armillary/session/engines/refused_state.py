"""An optimizer that is asked for its state while it has a part of it only, as a run is open: refused, with a remedy.

torch would write that part to a file without a word, and only a later job would find out.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["refuse_state"]

TO_SAVE = "run.export() gives the whole, run.save(folder) writes it (every rank calls them)"
TO_LOAD = "run.load(path) takes a file of it, or load it before the run begins"


def refuse_state(optimizer: Optimizer, refuse: Callable[[Optimizer, str, str], None]) -> list[RemovableHandle]:
    """Until the handles are removed, calls refuse(optimizer, call, remedy) whenever somebody asks for the state, or
    gives one."""

    def asked(one: Optimizer) -> None:
        refuse(one, "state_dict", TO_SAVE)

    def given(one: Optimizer, state: dict[str, Any]) -> None:
        refuse(one, "load_state_dict", TO_LOAD)

    return [optimizer.register_state_dict_pre_hook(asked), optimizer.register_load_state_dict_pre_hook(given)]
