"""Samples are on the disk as batches end, and an interrupted test goes on with them."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

import grail_lightning
from grail_lightning import EnvironmentTask, EpisodeLimits, MathData, Sampling, read_evaluation, read_samples
from grail_lightning.app import callbacks
from grail_lightning.app.callbacks.samples import _grading
from grail_lightning.app.results.records import prune
from grail_lightning.core.records.columns import SAMPLE
from grail_lightning.core.records.task import problem_id
from grail_lightning.core.runtime.seeds import sample_seed
from grail_lightning.worlds.programs.outcome import ProgramLimits
from grail_lightning.worlds.search.environment import Search
from tests.app.results.tested import rows_of, run_test
from tests.processes import run_script
from tests.runs import module, problems
from tests.worlds.programs.traced import Trusted

SAMPLES = Path("test/samples")


class Sampled(Callback):
    """Counts the batches that were sampled; Ctrl-C before the batch `stop`."""

    def __init__(self, stop=None):
        self.stop, self.batches = stop, 0

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == self.stop:
            raise KeyboardInterrupt

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.batches += outputs is not None


@pytest.fixture
def interrupted(undisturbed, tmp_path):
    """A copy of its folder, as if it had not ended."""
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / SAMPLES / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"finished": None}))
    return tmp_path


def test_samples_of_another_version_are_refused_before_a_model_is_loaded(interrupted, monkeypatch):
    file = interrupted / SAMPLES / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    loaded = "grail_lightning.core.distributed.sharding.load_policy"
    monkeypatch.setattr(loaded, lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(
        ValueError, match=r"the format 1 of another version. Move the folder away: `test` makes new"
    ) as refused:
        run_test(interrupted)
    assert "such as" not in str(refused.value), "no example, which might be the refused folder"


def test_each_sample_is_a_line_with_its_verdict_and_seed_and_the_folder_says_what_was_evaluated(undisturbed):
    folder, figures, _ = undisturbed
    samples = list(read_samples(folder / SAMPLES))
    assert [(s["index"], s["sample"]) for s in samples] == [(i, k) for i in range(4) for k in range(3)]
    assert [*samples[0]] == [*SAMPLE]
    asked = {problem_id(prompt): prompt for prompt in problems(4, "test")}
    for s in samples:
        prompt = asked[s["problem"]]
        assert (s["prompt"], s["reference"]) == (prompt.messages, prompt.reference)
        assert s["seed"] == sample_seed(s["problem"], s["sample"])
        assert s["prediction"] == prompt.task.answer(s["response"])
        assert s["correct"] == (s["status"] == "right") == (s["prediction"] == s["reference"])
    assert figures["test/accuracy"] == pytest.approx(sum(s["correct"] for s in samples) / 12)
    lengths = [s["num_tokens"] for s in samples if s["correct"]]
    assert figures["test/completions/mean_length_right"] == pytest.approx(sum(lengths) / len(lengths))
    facts = read_evaluation(folder / SAMPLES)
    assert facts["model"]["policy"] == "arithmetic"
    assert re.fullmatch("[0-9a-f]{64}", facts["model"]["digest"])
    assert (facts["num_samples"], facts["seed"], facts["sampling"]["max_response_length"]) == (3, 0, 40)
    (found,) = facts["datasets"].values()
    assert (found["problems"], found["source"], found["first"]) == (4, "arithmetic", None)
    assert facts["finished"]


class Game:
    """A game whose start is drawn by its seed."""

    def reset(self, level: int = 0, seed: int = 0) -> None:
        """Begin."""

    def get_reward(self) -> float:
        """Nothing is won."""
        return 0.0

    def look(self) -> str:
        """See the board."""
        return "empty"


def test_what_a_task_reads_beside_the_question_tells_problems_apart():
    code = Trusted()
    tested = [{"problem": "p", "entry": "f", "tests": [[[1], k]]} for k in (1, 2, 1)]
    one, two, again = (problem_id(code.prompt(row)) for row in tested)
    assert one == again != two
    # Rows that are equal are games of their own, in one order whatever the batches are.
    data = MathData(test=[{}, {}, {"level": 1}, {"level": 2}], task=EnvironmentTask(environment=Game))
    data.setup("test")
    prompts = [prompt for batch in data.test_dataloader()[0] for prompt in batch]
    assert len({problem_id(prompt) for prompt in prompts}) == 4
    assert [prompt.occurrence for prompt in prompts] == [0, 1, 0, 0]
    # What a run adds to the columns does not count.
    rewarded = replace(prompts[2], columns={**prompts[2].columns, "environment_reward": 0.5})
    assert problem_id(rewarded) == problem_id(prompts[2])


@pytest.mark.parametrize("cut", ["inside a line", "behind a line", "behind a batch", "inside the last line"])
def test_a_test_that_was_killed_anywhere_goes_on_to_the_same_table(cut, undisturbed, interrupted, capsys, caplog):
    file = interrupted / SAMPLES / "rank_00000.jsonl"
    whole = file.read_bytes()
    ends = [0, *(place for place, byte in enumerate(whole, 1) if byte == ord("\n"))]
    there = {"inside a line": 137, "behind a line": ends[5], "behind a batch": ends[9]}.get(cut, ends[12] - 1)
    file.write_bytes(whole[:there])
    capsys.readouterr()
    sampled = Sampled()
    with caplog.at_level("INFO"):
        assert run_test(interrupted, sampled) == undisturbed[1]
    assert capsys.readouterr().out.strip() == undisturbed[2].strip()
    done = there >= ends[9]
    assert sampled.batches == 2 - done
    assert f"{3 * done} of 4 problems are done" in caplog.text
    assert rows_of(interrupted / SAMPLES) == rows_of(undisturbed[0] / SAMPLES)
    assert read_evaluation(interrupted / SAMPLES)["finished"]
    assert not (interrupted / "test" / "samples.1").exists()


def test_an_interrupted_test_says_that_its_samples_are_kept_and_goes_on_behind_its_last_batch(
    undisturbed, tmp_path, caplog
):
    sampled = Sampled()
    with caplog.at_level("INFO"), pytest.raises((KeyboardInterrupt, SystemExit)):
        run_test(tmp_path, Sampled(stop=1))
    assert f"are kept in {tmp_path / SAMPLES}; the same command goes on with them." in caplog.text
    assert len(rows_of(tmp_path / SAMPLES)) == 9
    assert run_test(tmp_path, sampled) == undisturbed[1]
    assert sampled.batches == 1


def test_a_test_whose_table_could_not_be_printed_is_not_over(interrupted, monkeypatch):
    monkeypatch.setattr(callbacks.evaluation, "evaluation_table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_test(interrupted)
    assert read_evaluation(interrupted / SAMPLES)["finished"] is None


def _other_weights():
    other = module()
    configure = other.configure_model

    def moved():
        loaded = other.policy is not None
        configure()
        if not loaded:
            with torch.no_grad():
                next(other.policy.parameters()).add_(1e-3)

    other.configure_model = moved
    return {"ours": other}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (dict, "an earlier evaluation"),  # It is complete, and done anew.
        (_other_weights, "an interrupted evaluation, which differs in model.digest"),
        (lambda: {"sampling": Sampling(max_response_length=40, temperature=0.9)}, "differs in sampling.temperature"),
        (lambda: {"num_problems": 3}, "differs in datasets.arithmetic.digest, datasets.arithmetic.problems"),
        (lambda: seed_everything(5, verbose=False) and {}, "differs in seed"),
    ],
)
def test_a_test_that_is_complete_or_of_something_else_is_kept_and_never_continued(
    changed, why, undisturbed, interrupted, caplog
):
    if changed is dict:
        shutil.copytree(undisturbed[0], interrupted, dirs_exist_ok=True)
    before = (interrupted / SAMPLES / "rank_00000.jsonl").read_bytes()
    with caplog.at_level("INFO"), pytest.raises((KeyboardInterrupt, SystemExit)):
        run_test(interrupted, Sampled(stop=0), **changed())
    assert re.search(f"held .*{re.escape(why)}; it is now in", caplog.text)
    assert rows_of(interrupted / SAMPLES) == []
    assert (interrupted / "test" / "samples.1" / "rank_00000.jsonl").read_bytes() == before


def test_samples_belong_to_the_options_of_environments_and_sandboxes():
    def searching(top_k=3, **options):
        return _grading(EnvironmentTask(environment=partial(Search, top_k), **options))

    assert searching() == searching()
    others = searching(top_k=1), searching(limits=EpisodeLimits(max_turns=1)), searching(tool_instruction="Search.")
    assert all(other != searching() for other in others)
    limited = Trusted()
    limited.executor.limits = ProgramLimits(seconds=0.1)
    assert _grading(limited) != _grading(Trusted())


class Licensed(Game):
    """A game with something that has to be given back."""

    lent = 0

    def __init__(self):
        Licensed.lent += 1

    def close(self):
        """Give it back."""
        Licensed.lent -= 1


def test_environments_that_are_made_to_see_their_options_are_closed():
    task = EnvironmentTask(environment=Licensed)
    assert _grading(task)["environment"]["class"].endswith("Licensed")
    assert Licensed.lent == 0


def test_the_same_weights_and_problems_in_other_places_are_continued(undisturbed, interrupted):
    ours = module()
    ours.policy_name = str(Path(grail_lightning.__file__).parent / "worlds" / "assets" / "arithmetic")
    sampled = Sampled()
    assert run_test(interrupted, sampled, ours=ours) == undisturbed[1]
    assert sampled.batches == 0


def test_two_evaluations_do_not_write_into_one_folder(tmp_path):
    class Second(Callback):
        def on_test_batch_start(self, trainer, pl_module, *rest):
            run_test(tmp_path)

    with pytest.raises(ValueError, match=r"test is in use by another evaluation .* Wait for it"):
        run_test(tmp_path, Second())


def test_samples_that_stand_twice_are_removed(undisturbed, interrupted):
    whole = (interrupted / SAMPLES / "rank_00000.jsonl").read_bytes()
    (interrupted / SAMPLES / "rank_00001.jsonl").write_bytes(whole[:-30])
    prune(interrupted / SAMPLES, lambda sample: True)
    assert rows_of(interrupted / SAMPLES) == rows_of(undisturbed[0] / SAMPLES)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_sample_and_report_what_one_does(strategy, undisturbed, tmp_path):
    """The ranks have three problems and one, and one batch of the second rank is empty."""
    ranks = run_script(Path(__file__).with_name("tested.py"), tmp_path, 2, strategy, ranks=2)
    for run in ranks:
        assert json.loads(run.stdout.splitlines()[-1]) == undisturbed[1]
    assert 0 < undisturbed[1]["test/accuracy"] < 1
    assert rows_of(tmp_path / SAMPLES) == rows_of(undisturbed[0] / SAMPLES)
    assert len(list((tmp_path / SAMPLES).glob("rank_*.jsonl"))) == 2
    models = [read_evaluation(folder / SAMPLES)["model"] for folder in (undisturbed[0], tmp_path)]
    assert models[0] == models[1], "the digest of sharded weights is that of whole ones"
    assert ranks[0].stdout[: ranks[0].stdout.rindex("\n{")].strip() == undisturbed[2].strip()
    assert "maj@3" in undisturbed[2]


def test_a_test_of_two_ranks_is_continued_by_one(undisturbed, interrupted):
    folder = interrupted / SAMPLES
    lines = (folder / "rank_00000.jsonl").read_bytes().splitlines(keepends=True)
    # The first rank has problems 0, 2 and 3; the second, which has 1, was killed before the end of the first batch.
    (folder / "rank_00000.jsonl").write_bytes(b"".join(line for line in lines if json.loads(line)["index"] != 1))
    (folder / "rank_00001.jsonl").write_bytes(lines[3])
    sampled = Sampled()
    assert run_test(interrupted, sampled) == undisturbed[1]
    assert sampled.batches == 1  # The first one is sampled again as a whole.
    assert rows_of(folder) == rows_of(undisturbed[0] / SAMPLES)
