"""Runs through the command line on a CUDA device that is none: ``python -m tests.fake_cuda.commands CASE ...``.

The cases are those of `benchmarks/same_results.py`. Each prints a line of JSON: its name and the error, or null.
"""

import ctypes
import os

ctypes.CDLL(os.environ["FAKE_CUDA_GUARD"], ctypes.RTLD_GLOBAL)  # Before torch.
os.environ["GRAIL_TEST_DEVICE"] = "cuda"

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from tests.benchmark_modules import benchmark
from tests.fake_cuda import device

SMALL = "data.prompts_per_batch=2 data.num_train=2 model.execution.group_size=4 trainer.max_steps=1"

if __name__ == "__main__":
    same_results = benchmark("same_results")
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    device.install()
    for case in sys.argv[1:]:
        name, _, more = case.partition(" ")
        options = same_results.options_of(f"{same_results.QUICKSTART} {same_results.CASES[name]} {SMALL} {more}")
        with tempfile.TemporaryDirectory() as folder:
            ended = same_results.fit(options, Path(folder, "run"))
        print(json.dumps([case, ended.said if ended.code else None]), flush=True)
        torch.use_deterministic_algorithms(False)
    # Threads of torch run Python on this device. Where one still does as the interpreter ends, the process is aborted.
    os._exit(0)
