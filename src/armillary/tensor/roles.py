"""Which linear layer plays which role: by the names that torch and Hugging Face give them, or as the caller says."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

__all__ = ["FUSED", "WHOLE", "role_of"]

WHOLE = "whole"
FUSED = {"column": 1, "row": 1, "qkv": 3, "gate_up": 2}  # matrices that stand in one weight; the last two are columns

COLUMN = (
    "q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value", "to_q", "to_k", "to_v", "wq", "wk", "wv",
    "q_lin", "k_lin", "v_lin", "up", "up_proj", "gate", "gate_proj", "fc1", "c_fc", "linear1", "lin1", "wi", "wi_0",
    "wi_1", "w1", "w3", "intermediate.dense", "dense_h_to_4h",
)  # fmt: skip
ROW = (
    "o", "o_proj", "out_proj", "wo", "to_out.0", "out_lin", "down", "down_proj", "fc2", "c_proj", "linear2", "lin2",
    "w2", "output.dense", "dense_4h_to_h",
)  # fmt: skip
DEFAULTS = {
    **dict.fromkeys(COLUMN, "column"),
    **dict.fromkeys(ROW, "row"),
    **dict.fromkeys(("qkv", "qkv_proj", "Wqkv", "c_attn"), "qkv"),
    "gate_up_proj": "gate_up",
}


def role_of(path: str, roles: Mapping[str, str]) -> str:
    """The last pattern of the caller's that fits, else by name, else "whole".

    Args:
        path: of the module, in the model. roles: glob pattern -> role.
    """
    for pattern, role in reversed(list(roles.items())):
        if fnmatchcase(path, pattern):
            return role
    return next((role for name, role in DEFAULTS.items() if f".{path}".endswith(f".{name}")), WHOLE)
