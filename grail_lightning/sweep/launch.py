"""Becomes a command that receives SIGTERM when the process which started it ends, whatever ended it (on Linux).

    python launch.py PARENT COMMAND …

This file is run by its path, so that nothing of the package is imported.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(sys.argv[1]):  # It had ended before the call.
            sys.exit(143)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  (the command of the sweep, without a shell)
