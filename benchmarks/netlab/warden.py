"""A process that waits for the owner of a lab to die and then removes the lab.

`with` cleans up after exceptions and Ctrl-C, but nothing inside a process survives SIGKILL. The warden
does: it has a session of its own, waits on the owner's pidfd (which a reused pid cannot fool) and is
ended by the owner when the lab closes as it should.

Source: pidfd_open(2).
"""

import os
import select
import sys

from benchmarks.netlab.namespaces import LabName, is_owned, remove


def main() -> None:
    name = LabName(*(int(word) for word in sys.argv[1:]))
    try:
        owner = os.pidfd_open(name.pid)
    except ProcessLookupError:
        remove(name)
        return
    print("ready", flush=True)
    while is_owned(name):
        select.select([owner], [], [])
    remove(name)


if __name__ == "__main__":
    main()
