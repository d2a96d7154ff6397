"""`python -m grail_lightning.evaluation regrade RUN`: kept samples graded again (see `evaluate.command`)."""

import sys

from grail_lightning.evaluate.command import evaluation

if __name__ == "__main__":
    sys.exit(evaluation())
