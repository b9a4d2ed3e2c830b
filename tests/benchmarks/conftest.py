"""Makes `benchmarks` importable, which is run from the root of the repository and never installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
