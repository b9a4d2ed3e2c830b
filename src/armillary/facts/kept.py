"""A fact as it was written to a file, read back: a plan, a profile, a topology, what a run left of itself."""

import json
from pathlib import Path
from typing import Any

__all__ = ["read_kept"]


def read_kept(path: Path, kind: type[Any], noun: str) -> Any:
    """What `kind.save` wrote there, alone or, as `armillary plan --json` prints it, under its noun beside other things.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        whole = json.loads(path.read_text())
        is_beside = isinstance(whole, dict) and isinstance(whole.get(noun), dict)
        return kind.from_json(json.dumps(whole[noun])) if is_beside else kind.load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{noun}: {path} is no {noun} file: {_why(error)}") from error


def _why(error: Exception) -> str:
    """In words, whatever the type of the error would have said."""
    match error:
        case FileNotFoundError():
            return "there is none of that name"
        case OSError():
            return f"it cannot be read ({error.strerror})"
        case KeyError():
            return f"it lacks {error}"
        case json.JSONDecodeError():
            return f"it is no JSON ({error})"
    return str(error)
