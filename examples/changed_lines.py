"""How many lines a single-device script changes for several workers, by torch's DDP and by Armillary.

python examples/changed_lines.py    # counts lines added and removed, blank ones and the file's first line left out
"""

import difflib
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("transformer", "recommender", "resnet")


def changed(script: str, way: str) -> tuple[int, int]:
    """Lines added to and removed from the plain script."""
    plain, other = ((HERE / script / f"{name}.py").read_text().splitlines()[1:] for name in ("plain", way))
    lines = [line for line in difflib.unified_diff(plain, other, lineterm="", n=0) if line[1:].strip()]
    added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
    return added, sum(line.startswith("-") and not line.startswith("---") for line in lines)


def main() -> None:
    for script in SCRIPTS:
        told = [f"{way} +{added} -{removed}" for way in ("ddp", "with_armillary")
                for added, removed in [changed(script, way)]]  # fmt: skip
        print(f"{script}: {', '.join(told)}")


if __name__ == "__main__":
    main()
