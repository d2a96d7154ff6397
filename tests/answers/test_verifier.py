import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from grail_lightning.answers import Conventions, Verdict, Verifier
from grail_lightning.answers.__main__ import main

HANG = r"\sum_{m=1}^{\infty}\frac{\sin(m^{2})}{m}"
NEEDS_WORKER = (r"\sqrt{44}", r"2\sqrt{11}")


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=2, timeout_seconds=20.0) as opened:
        yield opened


def statuses(verdicts):
    return [verdict.status for verdict in verdicts]


def gone(pids, seconds=10.0):
    limit = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(lives, pids))


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_batch_is_graded_in_order(verifier):
    pairs = [("1/2", "0.5"), NEEDS_WORKER, ("2", "3"), (r"\sqrt{44}", r"\sqrt{7}")]
    pairs += [("2", ""), ("9", "(4, 9"), ("2", "8^{8^{8^8}}")]
    verdicts = verifier.grade(pairs)
    assert statuses(verdicts) == ["right", "right", "wrong", "wrong", "missing", "unparseable", "capped"]
    assert [(verdict.gold, verdict.prediction) for verdict in verdicts] == pairs
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False, False, False, False]
    assert verifier.grade([]) == []
    assert Verdict.missing("7") == Verdict(correct=False, status="missing", layer="none", gold="7", prediction="")


def test_cheap_pairs_start_no_worker_and_the_cache_is_bounded():
    with Verifier(num_workers=1, cache_size=3) as cheap:
        assert statuses(cheap.grade([("1/2", "0.5"), ("7", "8"), ("7", "9"), ("7", "10")])) == ["right"] + ["wrong"] * 3
        assert cheap._pool.workers == []
        assert len(cheap._cache) == 3


def test_no_pair_takes_more_than_a_second_of_a_processor_however_long_it_may_wait():
    with Verifier(num_workers=1, timeout_seconds=600.0) as patient:
        assert statuses(patient.grade([("3", HANG), NEEDS_WORKER])) == ["timeout", "right"]


def test_a_hanging_pair_times_out_and_costs_nothing_else():
    with Verifier(num_workers=2, timeout_seconds=1.5, cpu_seconds=60.0) as impatient:
        impatient.grade([NEEDS_WORKER, (r"\sqrt{18}", r"3\sqrt{2}")])  # both workers are up
        start = time.perf_counter()
        verdicts = impatient.grade(
            [("3", HANG), (r"\sqrt{12}", r"2\sqrt{3}"), (r"\sqrt{50}", r"5\sqrt{2}"), ("1", "2")]
        )
        assert statuses(verdicts) == ["timeout", "right", "right", "wrong"]
        assert time.perf_counter() - start < 12.0
        assert statuses(impatient.grade([(r"\sqrt{75}", r"5\sqrt{3}")])) == ["right"]  # the killed one was replaced


def test_a_dying_worker_costs_one_answer(verifier):
    def kill():
        while not (hanging := [worker for worker in verifier._pool.workers if worker.job == 0]):
            time.sleep(0.05)
        hanging[0].process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    verdicts = verifier.grade([("3", HANG), (r"\sqrt{12}", r"2\sqrt{3}"), (r"\sqrt{27}", r"3\sqrt{3}")])
    killer.join()
    assert statuses(verdicts) == ["crashed", "right", "right"]
    assert ("3", HANG) not in verifier._cache, "it is tried again when it comes again"


def test_a_bug_of_ours_is_not_taken_for_a_bad_answer(caplog):
    # A tolerance that is no number makes two layers raise: one here, one in the worker.
    here, there = [(r"\frac{4}{9}", "0.444444"), (r"\frac{5}{9}", "0.555555")], [(r"\sqrt{2}", "1.41421356")]
    with Verifier(num_workers=1, timeout_seconds=30.0, conventions=Conventions(tolerance="none")) as verifier:
        verifier.grade([NEEDS_WORKER])
        pid = verifier._pool.workers[0].process.pid
        verdicts = verifier.grade([*here, *there, ("2", "3"), (r"\sqrt{12}", r"2\sqrt{3}")])
        assert statuses(verdicts) == ["crashed", "crashed", "crashed", "wrong", "right"]
        assert verifier._pool.workers[0].process.pid == pid  # the worker lives on
        assert sorted(verifier.faults.values()) == [1, 2]
        assert any("ValueError: Invalid literal for Fraction: 'none' (compare.py:" in key for key in verifier.faults)
        assert any("TypeError" in key and "(values.py:" in key for key in verifier.faults)
        # A crash may be the machine's: it is tried again when it comes again.
        assert statuses(verifier.grade(here[:1])) == ["crashed"]
        assert sorted(verifier.faults.values()) == [1, 3]
    assert len(caplog.records) == 2  # each kind once
    assert "The verifier has a bug: ValueError" in caplog.messages[0]
    assert "0.444444" in caplog.messages[0]


def test_workers_outlive_signals_to_their_group_and_are_replaced_when_they_die_idle_or_are_closed():
    roots = iter([(rf"\sqrt{{{3 * n * n}}}", rf"{n}\sqrt{{3}}") for n in range(2, 9)])
    with Verifier(num_workers=1, timeout_seconds=30.0) as verifier:

        def process_of_a_right_answer():
            assert statuses(verifier.grade([next(roots)])) == ["right"]
            (worker,) = verifier._pool.workers
            return worker.process

        # The trainer saves before it ends: what it still grades must not count as crashed.
        first = process_of_a_right_answer()
        os.kill(first.pid, signal.SIGTERM)
        assert process_of_a_right_answer() is first
        assert first.poll() is None
        first.kill()
        first.wait()
        second = process_of_a_right_answer()
        assert second is not first
        verifier.close()
        assert gone([second.pid])
        assert process_of_a_right_answer() is not second


def test_a_repeated_pair_is_asked_once(verifier, monkeypatch):
    asked = []
    run = verifier._pool.run
    monkeypatch.setattr(verifier._pool, "run", lambda pairs, rules: asked.extend(pairs) or run(pairs, rules))
    pair = (r"\sqrt{147}", r"7\sqrt{3}")
    assert statuses(verifier.grade([pair] * 8)) == ["right"] * 8
    assert statuses(verifier.grade([pair] * 8)) == ["right"] * 8
    assert len(asked) == 1


def test_threads_may_share_a_verifier(verifier):
    def work(thread):
        pairs = [(rf"\sqrt{{{n * n * 2}}}", rf"{n if thread % 2 else n + 1}\sqrt{{2}}") for n in range(2, 8)]
        return thread, [verdict.correct for verdict in verifier.grade(pairs)]

    with ThreadPoolExecutor(4) as pool:
        for thread, correct in pool.map(work, range(6)):
            assert correct == [bool(thread % 2)] * 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_workers_grade_with_workers_of_their_own_and_leave_none(verifier):
    def grade(pairs):
        correct = [verdict.correct for verdict in verifier.grade(pairs)]
        return correct, os.getpid(), pids()

    def pids():
        return {worker.process.pid for worker in verifier._pool.workers}

    verifier.grade([(r"\sqrt{20}", r"2\sqrt{5}")])  # In a worker that children must not use.
    ours = pids()
    pairs = [(rf"\sqrt{{{n * n * 7}}}", rf"{n + n % 2}\sqrt{{7}}") for n in range(2, 6)]
    loader = torch.utils.data.DataLoader(pairs, 1, collate_fn=grade, num_workers=2, multiprocessing_context="fork")
    rows = list(loader)
    assert [correct for correct, _, _ in rows] == [[True], [False]] * 2
    processes, theirs = {process for _, process, _ in rows}, set().union(*(used for *_, used in rows))
    assert len(processes) == len(theirs) == 2
    assert not theirs & ours
    assert os.getpid() not in processes
    del loader
    assert gone(theirs)
    assert statuses(verifier.grade([(r"\sqrt{24}", r"2\sqrt{6}")])) == ["right"]
    assert pids() == ours, "the parent's own are alive"


SCRIPT = textwrap.dedent(
    r"""
    import multiprocessing, os, sys, threading
    from grail_lightning.answers import Verifier

    def hang():
        idle, seconds = sys.argv[2:]
        verifier = Verifier(num_workers=1 + int(idle), timeout_seconds=float(seconds))
        verifier.grade([(r"\sqrt{44}", r"2\sqrt{11}"), (r"\sqrt{12}", r"2\sqrt{3}")])
        print(os.getpid(), *[worker.process.pid for worker in verifier._pool.workers], flush=True)
        verifier.grade([("3", r"\sum_{m=1}^{\infty}\frac{\sin(m^{2})}{m}")])

    if sys.argv[1] == "main":
        hang()
    # As a data loader's worker is, which leaves without the functions of `atexit`.
    made = multiprocessing.get_context("fork").Process if sys.argv[1] == "process" else threading.Thread
    made = made(target=hang, daemon=True)
    made.start()
    made.join()
    sys.exit(made.exitcode)
    """
)
ENDS = {  # Where it grades: the signal to its group as a terminal sends it, or to itself; idle workers; the time limit.
    "main": (os.killpg, signal.SIGINT, 0, 60.0),
    "thread": (os.killpg, signal.SIGINT, 0, 60.0),
    # To the process that grades alone: its parent, interrupted too, might end it before it has cleaned up.
    "process": (os.kill, signal.SIGINT, 0, 60.0),
    # An idle worker sees its pipe close; a busy one is ended by its own alarm, a second after the time limit.
    "killed": (os.kill, signal.SIGKILL, 1, 1.5),
}


def test_nothing_is_left_behind_however_the_program_ends():
    programs = {}
    for place, (_, _, idle, seconds) in ENDS.items():
        arguments = [place.replace("killed", "main"), str(idle), str(seconds)]
        command = [sys.executable, "-c", SCRIPT, *arguments]
        programs[place] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    pids = {place: [int(pid) for pid in program.stdout.readline().split()] for place, program in programs.items()}
    assert [len(of_program) for of_program in pids.values()] == [2, 2, 2, 3]
    time.sleep(0.5)  # They hang in their workers by now.
    for place, program in programs.items():
        end, number, _, _ = ENDS[place]
        end(pids[place][0], number)
        program.communicate(timeout=30)
        assert program.returncode != 0
        assert gone(pids[place]), place


def test_workers_import_neither_the_caller_s_module_nor_its_folder_and_no_layer_imports_torch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('imported', flush=True)\n"
        "import sys\n"
        "from grail_lightning.answers import Verifier, library, spans, verifier\n"
        "with Verifier(num_workers=1) as opened:\n"
        r"    print(opened.grade([(r'\sqrt{44}', r'2\sqrt{11}')])[0].status)" + "\n"
        "assert 'sympy' not in sys.modules and 'mpmath' not in sys.modules\n"
        "library.load_libraries()\n"
        "assert 'torch' not in sys.modules and 'sympy' in sys.modules\n"
    )
    (tmp_path / "sympy.py").write_text("raise SystemExit('the current folder is not on the path of a worker')\n")
    (tmp_path / "numbers.py").write_text("raise SystemExit('nor this')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("imported\nright\n", 0), done.stderr


def test_a_copy_has_the_settings_and_workers_of_its_own(verifier):
    """As the processes of a data loader get one that are not forks."""
    with pickle.loads(pickle.dumps(verifier)) as copy:
        assert copy._settings == verifier._settings
        assert copy._pool.workers == []
        assert statuses(copy.grade([NEEDS_WORKER])) == ["right"]


def test_a_memory_limit_too_small_to_start_is_an_error_that_says_so():
    with (
        Verifier(num_workers=1, memory_gib=0.01) as verifier,
        pytest.raises(RuntimeError, match="`memory_gib` may be too small"),
    ):
        verifier.grade([NEEDS_WORKER])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Verifier(num_workers=0), "`num_workers` must be 1 or more, but got 0"),
        (lambda: Verifier(timeout_seconds=0.0), "`timeout_seconds` must be above 0, but got 0.0. Try 5."),
        (lambda: Verifier(cpu_seconds=-1.0), "`cpu_seconds` must be above 0, but got -1.0. Try 1."),
        (lambda: Verifier().grade([("7", None)]), "must hold \\(gold, prediction\\) as two strings"),
    ],
)
def test_impossible_settings_and_pairs_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_the_program_prints_verdict_layer_and_normal_forms(capsys):
    assert main([r"\frac{1}{2}", r"so \boxed{\dfrac{2}{4}}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "right  (layer: number)",
        r"gold        '\\frac{1}{2}'",
        r"prediction  '\\frac{2}{4}'",
    ]
    assert main(["7", "8"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [r"-\frac12", "-0.5"],
        ["-0.5", r"-\frac12"],
        ["--", r"-\frac12", "-0.5"],
        ["-0.5", "--timeout", "5", r"-\frac12"],
        ["-h", "-h"],  # letters with a sign
        ["--timeout=5", "--evaluated", "-x", "-x"],
        ["--8", "8"],
        ["-1", "--", "-1"],
    ],
)
def test_answers_that_begin_with_a_minus_sign_need_no_mark(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("right ")


def test_the_program_refuses_a_computation_where_it_is_told_to(capsys):
    assert main(["12", "7+5"]) == 0
    assert main(["12", r"So \boxed{7+5}", "--evaluated"]) == 1
    assert capsys.readouterr().out.splitlines()[3] == "unevaluated  (layer: number)"


@pytest.mark.parametrize(("arguments", "said"), [(["7"], "required: prediction"), (["1", "2", "-3"], "arguments: -3")])
def test_the_program_names_answers_that_are_missing_or_too_many(arguments, said, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_the_program_s_help_names_answers_and_options(capsys):
    assert main(["-h"]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("gold", "prediction", "--timeout", "--evaluated"))
