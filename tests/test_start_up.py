"""What a start leaves unimported. Modules are counted, not seconds, which hang on the machine."""

import subprocess
import sys

import pytest

# torch._dynamo comes with the pipeline tracer, and takes as long as torch itself.
NOT_BY_THE_LIBRARY = ("torch._dynamo", "torch.distributed.pipelining", "sympy", "matplotlib", "typer", "rich", "scipy")


def imported_by(program):
    """The modules there are at the end of a Python program of its own."""
    more = "\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program + more], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.timeout(100)
def test_the_library_brings_neither_the_tracer_nor_a_drawing_library_nor_a_command_line():
    found = imported_by("import armillary\narmillary.parallelize, armillary.simulate, armillary.verify")
    assert "torch" in found and "armillary.session.run" in found  # the whole library is there
    assert not found & set(NOT_BY_THE_LIBRARY)
