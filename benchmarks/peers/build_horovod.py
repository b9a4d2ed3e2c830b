"""Makes Horovod's wheel for the torch of this environment, once, and keeps it: build_horovod.py FOLDER

Horovod 0.28.1 is the last release and asks for C++14, which today's torch headers refuse; two lines of its build are
changed to C++17 (the one in horovod/torch alone ends in a link error). Gloo only, no MPI. The sdist comes by pip; cmake
and a C++ compiler must be there. Takes three to six minutes of one core. Ends with 0 in any case, as the benchmark runs
without Horovod and says why; the reason is kept in FOLDER/horovod.log.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.28.1"
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "MAKEFLAGS": "-j1",
}
STANDARD = {
    "CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)",
    "horovod/torch/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)",
}
MOST_SECONDS = 1800
PIP = [sys.executable, "-m", "pip", "--quiet"]


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "horovod.log"
    try:
        wheel = kept(folder) or built(folder, log)
        subprocess.run([*PIP, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True)
        subprocess.run([sys.executable, "-c", "import horovod.torch"], check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"horovod: not built, so not compared: {error}; see {log.name}", file=sys.stderr)
    return 0


def kept(folder: Path) -> Path | None:
    return next(folder.glob(f"horovod-{VERSION}-*.whl"), None)


def built(folder: Path, log: Path) -> Path:
    """The wheel, which is in `folder` from now on.

    Raises:
        ValueError: the sources are not those this was written for.
        SubprocessError: pip or the compiler gave up.
    """
    fetch = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([*PIP, *fetch, f"horovod=={VERSION}"], check=True)
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"horovod-{VERSION}"
    for name, line in STANDARD.items():
        text = (source / name).read_text()
        if text.count(line) != 1:
            raise ValueError(f"{name} of horovod {VERSION} has {text.count(line)} lines {line!r}, want 1")
        (source / name).write_text(text.replace(line, line.replace("14", "17")))
    with log.open("w") as words:
        subprocess.run(
            ["nice", "-n", "19", sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(folder)],
            cwd=source,
            env=os.environ | SETTINGS,
            stdout=words,
            stderr=words,
            timeout=MOST_SECONDS,
            check=True,
        )
    found = kept(folder)
    if found is None:
        raise ValueError("the build ended well and left no wheel")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
