"""Questions of several hops: their splits, and demonstrations of how they are looked up."""

import random
from collections import Counter
from pathlib import Path

import pytest

import grail_lightning
from grail_lightning.batch import Sampling
from grail_lightning.data import SearchData
from grail_lightning.engines import HFEngine
from grail_lightning.environments.search import Search, fact_graph
from grail_lightning.policy import load_policy, load_tokenizer
from grail_lightning.step.episodes import play
from grail_lightning.tasks import SearchSpace, search_demonstration

SPACE = SearchSpace()
PROBLEMS = SPACE.draw(300, "train")


def answer(turns):
    return turns[-1][0].removeprefix("Answer: ")


def played(**rates):
    """The turns of each demonstration with mistakes at these rates."""
    rng = random.Random(0)
    return [search_demonstration(problem, rng, **rates) for problem in PROBLEMS]


def test_draws_are_reproducible_and_splits_share_neither_questions_nor_graphs():
    drawn = {split: SPACE.sample(150, split) for split in ("train", "validation", "test")}
    assert drawn["train"] == SPACE.sample(150, "train") != SPACE.sample(150, "train", seed=1)
    assert [row["problem"] for row in drawn["train"]] == [problem.text for problem in PROBLEMS[:150]]
    assert len({row["problem"] for rows in drawn.values() for row in rows}) == 450
    graphs = [{row["graph"] for row in rows} for rows in drawn.values()]
    assert sum(map(len, graphs)) == len(set.union(*graphs)) > 200
    assert Counter(row["hops"] for rows in drawn.values() for row in rows).keys() == {2, 3, 4}


def test_a_path_goes_on_where_it_arrived_and_nowhere_twice():
    for problem in SearchSpace(min_hops=1, max_hops=6).draw(300, "train"):
        subjects, objects = [fact.subject for fact in problem.path], [fact.object for fact in problem.path]
        assert subjects[1:] == objects[:-1]
        assert len({*subjects, *objects}) == len(problem.path) + 1
        assert len({fact.relation for fact in problem.path}) == len(problem.path)
        row = problem.row()
        assert (row["answer"], row["hops"]) == (objects[-1], len(row["path"]))


def test_hops_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="1 <= min_hops <= max_hops <= 6, but got 3 and 2"):
        SearchSpace(min_hops=3, max_hops=2)


def test_a_demonstration_without_mistakes_is_right_and_every_search_of_it_scores():
    for problem, turns in zip(PROBLEMS, played(), strict=True):
        environment = Search()
        environment.reset(**problem.row())
        assert len(turns) == len(problem.path) + 1
        for said, told in turns[:-1]:
            query = said.removeprefix("<search>").removesuffix("</search>")
            assert told == f"\n<result>{environment.search(query)}</result>\n"
            assert environment.score_turn() == 1.0
        assert turns[-1] == (f"Answer: {problem.path[-1].object}", "")


def test_each_kind_of_mistake_occurs_at_its_rate_and_makes_answers_wrong():
    right = {
        name: sum(answer(t) == p.path[-1].object for t, p in zip(played(**rates), PROBLEMS, strict=True)) / 300
        for name, rates in {
            "early": {"early": 0.3},
            "reading": {"reading": 0.3},
            "query": {"query": 0.3, "again": 0.0},
            "corrected": {"query": 0.3, "again": 1.0},
        }.items()
    }
    # With 2, 3 or 4 hops, about as often: the mean of 0.7^(hops - 1) is 0.51, that of 0.7^hops 0.36. A wrong name or
    # query leads to the right answer now and then.
    assert right["early"] == pytest.approx(0.51, abs=0.09)
    assert right["reading"] == pytest.approx(0.38, abs=0.1)
    assert 0.3 < right["query"] < 0.65
    # Every wrong query that did not find its fact by chance costs a turn, and no answer.
    assert right["corrected"] == 1.0
    assert sum(map(len, played(query=0.3))) > sum(len(problem.path) + 1 for problem in PROBLEMS) + 150


@pytest.mark.slow
def test_the_packaged_policy_is_small_and_right_on_30_to_60_percent_of_its_rollouts():
    folder = Path(grail_lightning.__file__).parent / "assets" / "search"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2 * 2**20
    policy, engine = load_policy("search").eval(), HFEngine()
    engine.update_weights(policy)
    (asked,) = SearchData(num_val=300, seed=1, problems=SearchSpace(max_hops=3)).load("val")
    batch = play(engine, policy, list(asked.prompts), 1, Sampling(max_response_length=64), range(300))
    right = [p.task.answer(text) == p.reference for text, p in zip(batch.texts, batch.prompts, strict=True)]
    # The standard error of 300 samples is 2.9 points.
    assert 0.3 <= sum(right) / len(right) <= 0.6
    assert sum(episode.end == "answered" for episode in batch.episodes) > 280
    assert {turn.score for episode in batch.episodes for turn in episode.turns} == {1.0, 0.0, None}
    calls = [call.status for episode in batch.episodes for call in episode.calls]
    assert calls.count("done") > 0.98 * len(calls)


def test_a_name_is_the_same_tokens_in_a_question_a_query_a_result_and_an_answer():
    tokenizer, problem = load_tokenizer("search"), PROBLEMS[0]
    texts = [problem.text, *(part for turn in search_demonstration(problem, random.Random(0)) for part in turn)]
    for fact in fact_graph(problem.seed).facts:
        for part in f"{fact.subject} {fact.object}".split():
            assert len(tokenizer(f" {part}")["input_ids"]) == 1
    assert all(
        tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text for text in texts
    )
    for tag in ("<search>", "</search>", "<result>", "</result>"):
        assert len(tokenizer(tag)["input_ids"]) == 1
