"""``python -m grail_lightning.report RUN…``: figures of runs with intervals and differences, and learning curves."""

import signal

from grail_lightning.app.report import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # What reads the report, such as `head`, may have seen enough.
    main()
