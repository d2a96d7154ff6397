"""The verifier where training puts it: data loader workers, ranks, threads, interrupted programs."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from grail_lightning.answers import Verifier
from tests.answers.test_verifier import gone
from tests.processes import run_script

# Each needs a worker process: roots are beyond the cheap layers.
PAIRS = [(rf"\sqrt{{{n * n * 2}}}", rf"{n + n % 2}\sqrt{{2}}") for n in range(2, 10)]
CORRECT = [n % 2 == 0 for n in range(2, 10)]


class Graded(torch.utils.data.Dataset):
    """Grades its pairs where they are fetched; the workers' process ids travel along."""

    def __init__(self, verifier):
        self.verifier = verifier

    def __len__(self):
        return len(PAIRS)

    def __getitem__(self, place):
        (verdict,) = self.verifier.grade([PAIRS[place]])
        pids = [worker.process.pid for worker in self.verifier._pool.workers]
        return verdict.correct, os.getpid(), pids


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # Processes of the latter begin as those by `spawn` do.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_workers_grade_with_workers_of_their_own_and_leave_none(method):
    with Verifier(num_workers=1, timeout_seconds=60.0) as verifier:
        verifier.grade([(r"\sqrt{20}", r"2\sqrt{5}")])  # a worker that children must not use
        ours = {worker.process.pid for worker in verifier._pool.workers}
        loader = torch.utils.data.DataLoader(
            Graded(verifier), batch_size=None, num_workers=2, multiprocessing_context=method
        )
        rows = list(loader)
        assert [correct for correct, _, _ in rows] == CORRECT
        processes = {process for _, process, _ in rows}
        assert len(processes) == 2
        assert os.getpid() not in processes
        theirs = {pid for *_, pids in rows for pid in pids}
        assert len(theirs) == 2
        assert not theirs & ours
        del loader
        assert gone(theirs)
        assert verifier.grade([(r"\sqrt{24}", r"2\sqrt{6}")])[0].correct  # the parent's own is alive
        assert {worker.process.pid for worker in verifier._pool.workers} == ours


RANK = textwrap.dedent(
    r"""
    import json, os, sys
    import torch, torch.distributed as dist
    from grail_lightning.answers import Verifier

    rank, store = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    # Each rank grades its own: n√2 against √(2n²), which rank 1 gets wrong.
    pairs = [(rf"\sqrt{{{n * n * 2}}}", rf"{n + rank}\sqrt{{2}}") for n in range(2, 8)]
    with Verifier(num_workers=1, timeout_seconds=60.0) as verifier:
        for _ in range(3):
            right = torch.tensor(sum(verdict.correct for verdict in verifier.grade(pairs)))
            dist.all_reduce(right)
        pids = [worker.process.pid for worker in verifier._pool.workers]
    print(json.dumps({"right": int(right), "workers": pids}), flush=True)
    dist.destroy_process_group()
    """
)


def test_two_ranks_grade_at_the_same_time_each_with_workers_of_its_own(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    ranks = run_script(tmp_path / "rank.py", tmp_path / "store", ranks=2)
    reports = [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]
    assert [report["right"] for report in reports] == [6, 6]  # six of rank 0, none of rank 1
    assert len({pid for report in reports for pid in report["workers"]}) == 2
    assert gone([pid for report in reports for pid in report["workers"]])


INTERRUPTED = textwrap.dedent(
    r"""
    import os, sys, threading, time
    import torch
    from grail_lightning.answers import Verifier

    HANG = ("3", r"\sum_{m=1}^{\infty}\frac{\sin(m^2)}{m}")

    class Hanging(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, place):
            verifier = Verifier(num_workers=1, timeout_seconds=60.0)
            verifier.grade([(r"\sqrt{44}", r"2\sqrt{11}")])
            print(os.getpid(), *[worker.process.pid for worker in verifier._pool.workers], flush=True)
            return verifier.grade([HANG])[0].correct

    if __name__ == "__main__":
        if sys.argv[1] == "loader":
            for _ in torch.utils.data.DataLoader(Hanging(), batch_size=None, num_workers=1):
                pass
        else:
            thread = threading.Thread(target=Hanging().__getitem__, args=(0,), daemon=True)
            thread.start()
            thread.join()
    """
)


@pytest.mark.parametrize("place", ["loader", "thread"])
def test_an_interrupt_while_grading_elsewhere_ends_the_program_and_leaves_no_process(place, tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    program = subprocess.Popen(
        [sys.executable, str(script), place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)  # it hangs in the worker by now
    os.killpg(program.pid, signal.SIGINT)  # as the terminal does: every process of the foreground group
    program.communicate(timeout=30)
    assert program.returncode != 0
    assert gone(pids)
