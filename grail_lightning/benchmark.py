"""``python -m grail_lightning.benchmark METHOD``: how good a credit method is, where the right credit is known."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Before torch is imported: its profiler writes lines of its own.

from grail_lightning.app.benchmark.main import main

if __name__ == "__main__":
    main()
