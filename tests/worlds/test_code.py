"""Programs as a task: what rows of three forms say, and what becomes of programs; which statements are labelled."""

import json
import time
from pathlib import Path

import pytest
import torch

from grail_lightning import ArithmeticTask, CodeTask, MathData, RewardSpec, grade_answers, read_samples
from grail_lightning.answers import Marker
from grail_lightning.app.regrade import main as regrade
from grail_lightning.core.rollout.grading import TaskVerifiers, labelled_steps
from grail_lightning.worlds.code.functions import FunctionSpace, slips
from grail_lightning.worlds.code.task import read_problem
from grail_lightning.worlds.programs.outcome import ProgramLimits, TestCall, Tests
from tests.shell import SHORT, fails_early, main

REFERENCE = """def f(xs, n):
    total = 0
    for x in xs:
        if x <= n:
            total += x
    return total"""
ROW = {
    "problem": "Write f(xs, n). Return the sum of the numbers that are at most n.",
    "entry": "f",
    "tests": [[[[1, 2, 3], 2], 3], [[[5], 1], 0], [[[], 1], 0], [[[4, -1], 9], 3]],
    "reference": REFERENCE,
    "tempting": ["", "", "", "if x < n:", "", ""],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/53",
    "prompt": 'def add(x: int, y: int):\n    """Add two numbers x and y\n    >>> add(2, 3)\n    5\n    """\n',
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(0, 1) == 1\n"
    "    assert candidate(1, 0) == 1\n",
}
MORE = "def check(candidate):\n    for k in range(9):\n        assert candidate(k, k) == 2 * k"
HELPER = "import math\ndef double(x):\n    return 2 * x"
MBPP = {
    "task_id": 11,
    "text": "Write a python function to remove first and last occurrence of a given character from the string.",
    "code": "def remove_Occ(s,ch): \n    return s.replace(ch, '', 1)[::-1].replace(ch, '', 1)[::-1]",
    "test_setup_code": "",
    "test_list": [
        'assert remove_Occ("hello","l") == "heo"',
        'assert sorted(remove_Occ("abcda","a")) == ["b", "c", "d"]',
    ],
    "challenge_test_list": [],
}
# The sanitized file has another column for the text, and imports.
SANITIZED = {"prompt": MBPP["text"], "test_imports": ["import math"]} | {k: MBPP[k] for k in ("code", "test_list")}


def fenced(program):
    return f"So:\n```python\n{program}\n```"


@pytest.fixture(scope="module")
def task(programs_run):
    made = CodeTask(instruction="", limits=ProgramLimits(seconds=1.0))
    yield made
    made.executor.close()


def asserted(entry, *assertions, preamble=""):
    return Tests(entry, (), assertions, preamble)


PI, NEAR = "from math import pi", "from math import isclose\ndef near(x): return x"
CHECK = "def check(f, x):\n    assert f(x)"
ADDS = asserted("add", "assert add(0, 1) == 1", "assert add(1, 0) == 1", preamble="METADATA = {}")


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"entry": "f", "tests": [[[[1], 2], [3]]]}, Tests("f", (TestCall(([1], 2), [3]),))),
        # A text has what JSON lacks.
        (
            {"entry": "f", "tests": "[((1, {2}), (3,)), ([], None)]"},
            Tests("f", (TestCall((1, {2}), (3,)), TestCall((), None))),
        ),
        ({"tests": ["assert g(1) == abs(-2)"]}, asserted("g", "assert g(1) == abs(-2)")),
        ({"tests": ["assert p(h(1))"], "entry": "", "reference": "def h(x): pass"}, asserted("h", "assert p(h(1))")),
        ({"tests": ["assert g(pi) < 4"], "setup": PI}, asserted("g", "assert g(pi) < 4", preamble=PI)),
        ({"tests": ["assert k(1) < g(2)"], "entry": "g"}, asserted("g", "assert k(1) < g(2)")),
        # What the setup binds is not the function that is asked for.
        (
            {"tests": ["assert isclose(near(f(1)), 2)"], "setup": NEAR},
            asserted("f", "assert isclose(near(f(1)), 2)", preamble=NEAR),
        ),
        ({"tests": ["check(f, 1)"], "setup": CHECK}, asserted("f", "check(f, 1)", preamble=CHECK)),
        # A function may have the name of a built-in one.
        ({"tests": ["assert sum(1)"], "reference": "def sum(x): pass"}, asserted("sum", "assert sum(1)")),
        (MBPP, asserted("remove_Occ", *MBPP["test_list"])),
        (SANITIZED | {"test_setup_code": "x"}, asserted("remove_Occ", *MBPP["test_list"], preamble="import math\nx")),
        # A file that can be run by itself calls its test.
        (HUMAN_EVAL | {"test": f"{HUMAN_EVAL['test']}\ncheck(add)"}, ADDS),
        # A `check` that is more than assertions stays whole.
        (HUMAN_EVAL | {"test": MORE}, asserted("add", "check(add)", preamble=MORE)),
        # The tests may call what the prompt defines.
        (
            HUMAN_EVAL | {"prompt": f"{HELPER}\n{HUMAN_EVAL['prompt']}", "test": "def check(f): assert f(0, 1) == 1"},
            asserted("add", "assert add(0, 1) == 1", preamble=HELPER),
        ),
    ],
)
def test_rows_of_three_forms_are_read(row, tests):
    assert read_problem({"problem": "p"} | row).tests == tests


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "3"}, "A row must have `problem` and `tests`"),
        ({"tests": []}, "`tests` must be a list that is not empty"),
        ({"tests": [[[1], 2]]}, "`entry` must name the function that `tests` call, but got None"),
        ({"entry": "def", "tests": [[[1], 2]]}, "`entry` must name the function .*, but got 'def'"),
        ({"entry": "f", "tests": [[1, 2]]}, r"A test must be \[arguments, result\].* but got \[1, 2\]"),
        ({"entry": "f", "tests": [[[1], open]]}, "A test must hold literals of Python"),
        ({"entry": "f", "tests": "[([1], f(2))]"}, "`tests` must be literals of Python"),
        ({"tests": ["assert f("]}, r"`an assertion` must be Python, but got 'assert f\('"),
        ({"tests": ["assert f(1)", "f(1) == 2"]}, r"Tests must be assertions, .* but got 'f\(1\) == 2'"),
        ({"tests": ["assert (f(1) == 2, 'no')"]}, "Tests must be assertions"),
        ({"tests": ["near(f(1), 2)"], "setup": "def near(a, b): return a == b"}, "Tests must be assertions"),
        ({"tests": ["assert True"]}, r"Each test must call .* \(none was found\)"),
        ({"tests": ["assert f(1)", "assert g(1)"]}, r"same function \(f\), but got 'assert g\(1\)'"),
        (MBPP | {"test": "assertion(remove_Occ('a'), '')"}, "`test`, as in MBPP.*, cannot be read beside `test_list`"),
        (MBPP | {"code": 5}, "`code` must be text, but got 5"),
        (HUMAN_EVAL | {"test": "assert add(1, 1) == 2"}, r"must have `prompt`, .* and `check\(candidate\)` in `test`"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error(row, message):
    with pytest.raises(ValueError, match=message):
        read_problem({"problem": "p"} | row)


PAIR = {"input": "3\\n1 2 3\\n", "output": "6", "testtype": "stdin"}
CALL = PAIR | {"input": "[1, 2]\\n3", "testtype": "functional"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (
            {"question_content": "Add.", "public_test_cases": json.dumps([PAIR])},
            r"`public_test_cases` .* LiveCodeBench",
        ),
        ({"question_content": "Add.", "private_test_cases": "eJxrYJ"}, r"`private_test_cases` .* LiveCodeBench"),
        (
            {"question": "Add.", "input_output": '{"inputs": ["1"], "outputs": ["1"]}'},
            r"`input_output` .* APPS and TACO",
        ),
        ({"description": "Add.", "public_tests": {"input": ["1"], "output": ["1"]}}, r"`public_tests` .* CodeContests"),
        ({"description": "Add.", "official_tests": [PAIR]}, r"`official_tests` .* Codeforces"),
        ({"problem": "Add.", "tests": [PAIR]}, "`tests` .* LiveCodeBench and others"),
        ({"problem": "Add.", "tests": json.dumps([PAIR | {"more": None}])}, "`tests` .* LiveCodeBench and others"),
        ({"problem": "Add.", "tests": repr([PAIR])}, "`tests` .* LiveCodeBench and others"),
        ({"problem": "Add.", "tests": {"inputs": ["1"], "outputs": ["1"]}}, "`tests` .* LiveCodeBench and others"),
    ],
)
def test_tests_of_programs_that_read_stdin_are_refused_as_what_they_are(row, named):
    with pytest.raises(ValueError, match=rf"{named}, `testtype: stdin`\)\. `CodeTask` calls a function and compares"):
        read_problem(row)


def test_calls_as_texts_are_refused_with_the_form_that_is_read():
    for row in ({"public_test_cases": json.dumps([CALL])}, {"problem": "Add.", "tests": [CALL], "entry": "f"}):
        with pytest.raises(ValueError, match=r"`testtype: functional`\)\. Write each as \[arguments, result\]"):
            read_problem(row)


def test_arguments_that_look_like_such_pairs_are_arguments():
    test = [[{"input": 1, "output": 2}], 3]
    for tests in ([test], repr([test])):
        assert read_problem({"problem": "p", "entry": "f", "tests": tests}).tests.calls[0].arguments == (test[0][0],)


def test_rows_whose_reference_fails_are_counted_and_graded(task, tmp_path):
    file, rows = tmp_path / "mbpp.jsonl", [MBPP, MBPP | {"test_setup_code": "root = Node(1)"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    said = (
        "Of 2 reference programs that were run, {} do not pass .* that of `remove_Occ` "
        r"\(refused: the preamble of the tests does not run: NameError: .*Node"
    )
    with pytest.warns(UserWarning, match=f"mbpp.jsonl: {said.format(1)}"):
        (asked,) = MathData(train=str(file), task=task).load("train")
    verdicts = task.verdicts([fenced(row["code"]) for row in rows], list(asked.prompts))
    assert [verdict.correct for verdict in verdicts] == [True, False]
    with pytest.raises(ValueError, match=f"{said.format(2)}.*Correct the rows"):
        task.check_prompts([task.prompt(rows[1])] * 2)
    file.write_text("\n".join(map(json.dumps, [MBPP, {"problem": "p", "answer": "3"}])))
    with pytest.raises(ValueError, match=r"mbpp.jsonl, line 2: A row must have `problem` and `tests`"):
        MathData(train=str(file), task=task).load("train")


def test_references_are_run_where_there_are_some_and_of_many_a_part(task, monkeypatch):
    monkeypatch.setattr("grail_lightning.worlds.code.task._CHECKED", 2)
    prompts = [task.prompt(ROW | {"reference": f"def f(xs, n): return {k}" if k else " "}) for k in range(7)]
    assert task.check_prompts(prompts[:1]) == ""
    with pytest.raises(ValueError, match="Of 2 reference programs that were run, 2 do not pass"):
        task.check_prompts(prompts[1:])


def test_a_prompt_shows_a_test_where_the_problem_does_not_name_the_function(task):
    system, user = CodeTask(system_prompt="You write Python.").prompt(MBPP).messages
    assert system == {"role": "system", "content": "You write Python."}
    assert user["content"].startswith(MBPP["text"] + "\n\nThe program has to pass these tests:\nassert remove_Occ(")
    assert user["content"].endswith(' == "heo" Please reason step by step, and put the answer into one last block '
                                    "between ```python and ```.")  # fmt: skip
    # An English word is no name of a function.
    named = MBPP | {"code": "def remove(x): return x", "test_list": ["assert remove(1) == 1"]}
    assert task.prompt(named).messages[0]["content"].endswith("pass these tests:\nassert remove(1) == 1")
    told = task.prompt(named | {"text": "Write `remove`, which returns its argument."})
    assert told.messages[0]["content"] == "Write `remove`, which returns its argument."
    assert task.prompt(HUMAN_EVAL).messages == [{"role": "user", "content": HUMAN_EVAL["prompt"]}]
    assert task.prompt(HUMAN_EVAL).reference.endswith('"""\n    return x + y\n')
    assert task.prompt(ROW).messages == [{"role": "user", "content": ROW["problem"]}]
    assert task.prompt(ROW).reference == task.problem(task.prompt(ROW)).reference == REFERENCE


def test_the_program_is_the_last_block_and_its_offset_is_exact(task):
    text = "```\nfirst\n```\nü and\n```python\ndef f():\n    pass\n```"
    program, offset = task.program(text)
    assert program == text[offset : offset + len(program)] == "def f():\n    pass"
    assert (task.program("```\n\n```"), task.program("def f(): pass")) == (None, None)
    indented = "1. So:\n\n   ```python\n   def f():\n       pass  # \u2028x\n   ```"  # No new line for Python.
    assert (task.answer(indented), task.program(indented)) == (f"{program}  # \u2028x", None)
    assert task.label_steps(indented, task.prompt(ROW)) is None
    lines = 'def f():\n    return """a\n  \nb"""'
    assert task.answer(fenced(lines)) == lines, "a text of several lines stays as it is"
    marked = CodeTask(answer=Marker("[BEGIN]", to_end=True))
    assert marked.program("[BEGIN]\nx = 1\ny = 2\n") == ("x = 1\ny = 2", 8)


SEVERAL = "def f(x):\n    if x:\n        return 1\n    return  -x  \n\nprint(f)"


@pytest.mark.parametrize(
    ("program", "explained"),
    [
        (SEVERAL, "return  -x"),
        ("x = 1", "x = 1"),
        ("def f(xs):\n    return sum(\n        x for x in xs\n    )", "return sum(\n        x for x in xs\n    )"),
        ("def f(x):\n    if x: return x\n    returned = -x\n    print(returned)", "return x"),
        ('def f(x):\n    return 1\n\ndef g():\n    """\n    return nothing\n    """', "return 1"),
        ("def f(x):\n    return x +\n    returns = 1 (", "return x +"),
    ],
)
def test_credit_methods_explain_the_last_return_statement_or_the_whole_program(task, program, explained):
    """What a return statement is, Python's grammar says."""
    text = fenced(program)
    (span,) = task.answer_spans(text)
    assert text[span.content_start : span.content_stop] == explained
    assert text[span.start : span.stop] == text[text.rindex(explained) if "return" in explained else 4 :]
    (whole,) = CodeTask(explained="program").answer_spans(text)
    assert (text[whole.content_start : whole.content_stop], whole.stop) == (program, len(text))
    assert task.answer_spans("return 1") == []


def test_programs_are_graded_beside_other_tasks_and_their_order_is_kept(task):
    texts = [fenced(REFERENCE), "\\boxed{3}", fenced(REFERENCE.replace("<=", "<")), "no program", fenced("def f(")]
    texts += [fenced("while True: pass"), fenced("def f(xs, n): return [].pop()"), fenced(MBPP["code"])]
    arithmetic = ArithmeticTask().prompt({"problem": "1+2"})
    prompts = [task.prompt(MBPP if k == 7 else ROW) if k != 1 else arithmetic for k in range(8)]
    verdicts = grade_answers(texts, prompts, TaskVerifiers())
    assert [(v.status, v.layer) for v in verdicts] == [
        ("right", "passed"),
        ("right", "string"),
        ("wrong", "failed"),
        ("missing", "none"),
        ("wrong", "syntax"),
        ("timeout", "timeout"),
        ("wrong", "raised"),
        ("right", "passed"),
    ]
    rewards = [RewardSpec(function="correctness"), RewardSpec(function="tests_passed", weight=0.5)]
    paid = CodeTask(rewards=rewards)
    paid.check_columns(ROW)
    ours = slice(2, 5)
    assert paid.reward(texts[ours], prompts[ours], verdicts[ours]) == [0.375, 0.0, 0.0]
    assert task.reward(texts[:1], prompts[:1], verdicts[:1]) == [1.0]


def labels(task, program, row=ROW):
    """The flawed lines of a program with their kinds; None without labels."""
    text = fenced(program)
    steps = labelled_steps(text, task.prompt(row))
    if steps is None:
        return None
    assert [text[step.start : step.stop] for step in steps] == [x.strip() for x in program.split("\n") if x.strip()]
    return [(text[s.start : s.stop], s.kind) for s in steps if s.kind != "sound"]


@pytest.mark.parametrize(
    ("changes", "flaws"),
    [
        ([], []),
        ([("<=", ">=")], [("if x >= n:", "slip")]),
        # Two statements that are wrong together.
        ([("<=", "<"), ("+=", "-=")], [("if x < n:", "misconception"), ("total -= x", "slip")]),
        # The result is the same: only the other statement is flawed.
        ([("total = 0", "total = 0 + 0"), ("+=", "-=")], [("total -= x", "slip")]),
        ([("n:", "n")], [("if x <= n", "slip")]),  # A colon is missing.
        ([("    total = 0\n", "")], [("for x in xs:", "slip")]),  # The statement before it is missing.
        ([("    return", "    total = 1\n    return")], [("total = 1", "slip")]),  # One too many.
        ([("\n    return total", "")], [("total += x", "slip")]),
        ([("x <= n", "x  <=n"), ("total = 0", "total=2")], [("total=2", "slip")]),  # Blanks do not count.
    ],
)
def test_the_first_statement_whose_replacement_makes_all_tests_pass_is_flawed(task, changes, flaws):
    program = REFERENCE
    for old, new in changes:
        assert old in program
        program = program.replace(old, new, 1)
    assert labels(task, program) == flaws


def test_programs_that_cannot_be_compared_have_no_labels(task):
    assert labels(task, "def f(xs, n):\n    return sum(x for x in xs if x <= n)") == []  # It is right.
    other = "def f(a, b):\n    s = 1\n    for c in a:\n        if c < b:\n            s += c\n    return s\n# end"
    assert labels(task, other) is None
    assert labels(task, "return 1", {k: v for k, v in ROW.items() if k != "reference"}) is None
    assert task.label_steps("no program", task.prompt(ROW)) is None


def test_repairing_the_flawed_lines_makes_all_tests_pass_and_no_fewer_do(task):
    """Each line of generated programs in turn, with every slip of it."""
    for problem in FunctionSpace().draw(4, "validation"):
        prompt, lines = task.prompt(problem.row()), problem.program.split("\n")
        for number, line in enumerate(problem.lines):
            for wrong in slips(line.text)[:3]:
                changed = lines.copy()
                changed[number] = lines[number].replace(line.text, wrong)
                text = fenced("\n".join(changed))
                flawed = [text[s.start : s.stop] for s in labelled_steps(text, prompt) if s.kind != "sound"]
                right = task.verdicts([text], [prompt])[0].correct
                assert flawed == ([] if right else [wrong.strip()])


@pytest.mark.parametrize("piece", [" ", "x\n", "    if x:\n", "`", "```\n", "\\", "x ", "\x00", "ü\r\n"])
def test_any_text_is_labelled_or_not_in_linear_time(task, piece):
    text, start = fenced("a" + piece * (100_000 // len(piece)) + "b"), time.thread_time()
    labelled_steps(text, task.prompt(ROW))
    assert time.thread_time() - start < 5  # Linear: well under a second. Quadratic: minutes.


def options(folder, rows):
    """The command line of a short run on rows in the form of MBPP."""
    file = folder / "mbpp.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return ["--model.policy=code", "--data=MathData", "--data.task=CodeTask", f"--data.train={file}"]


@pytest.mark.filterwarnings("ignore:`data.prompts_per_batch` is 16")
def test_credit_that_needs_programs_is_refused_before_a_model_is_loaded_where_there_are_none(
    programs_run, tmp_path, capsys
):
    given = options(tmp_path, [MBPP | {"code": None}])
    said = fails_early(capsys, "fit", SHORT[0], *given, "--model.credit=EGCA")
    assert "`EGCA` compares programs with that of `reference`, which 1 of 1 rows do not have. Add the column" in said
    said = fails_early(capsys, "fit", *SHORT, "--model.credit=ExecutedMask")
    assert "`ExecutedMask` needs a task whose responses are programs, such as `CodeTask`, but got" in said


def test_a_file_in_the_form_of_mbpp_is_tested(programs_run, empty_folder):
    # What the packaged policy knows, as MBPP would have it.
    rows = []
    for k, row in enumerate(FunctionSpace().sample(8, "train")):
        tests = [f"assert f(*{arguments}) == {result}" for arguments, result in row["tests"]]
        rows.append({"task_id": k, "text": row["problem"], "code": row["reference"], "test_list": tests})
    given = [*options(empty_folder, rows), "--data.task.instruction=", f"--data.test={empty_folder / 'mbpp.jsonl'}"]
    given += ["--evaluation.sampling.max_response_length=80", "--evaluation.num_samples=2"]
    main(["test", SHORT[0], "--trainer.enable_progress_bar=false", *given])
    samples = list(read_samples(Path("runs/quickstart/test/samples")))
    assert len(samples) == 16
    assert {sample["status"] for sample in samples} <= {"right", "wrong", "missing"}
    assert {sample["layer"] for sample in samples if sample["correct"]} == {"passed"}
    with pytest.raises(SystemExit, match="2"):  # Their programs would have to be run.
        regrade(["runs/quickstart"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.slow
def test_a_resumed_run_with_egca_has_the_weights_of_one_that_never_stopped(programs_run, tmp_path, monkeypatch):
    config = Path("configs/quickstart_code.yaml").absolute()
    options = [f"--config={config}", "--model.credit=EGCA", "--data.prompts_per_batch=4", "--data.num_val=8"]
    options += ["--trainer.val_check_interval=2", "--pictures.every_n_batches=0", "--data.num_train=64"]
    weights = []
    for name, runs in {"whole": [["4"]], "resumed": [["2"], ["4", "--ckpt_path=last"]]}.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for steps, *more in runs:
            main(["fit", *options, f"--trainer.max_steps={steps}", *more])
        (file,) = Path().rglob("last.ckpt")
        weights.append(torch.load(file, weights_only=False)["state_dict"])
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
