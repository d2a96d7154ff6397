"""Questions of several hops: their splits, and demonstrations of how they are looked up."""

import random

from grail_lightning.environments.search import Search
from grail_lightning.tasks import SearchSpace, search_demonstration

PROBLEMS = SearchSpace().draw(100, "train")


def test_splits_share_no_graphs():
    graphs = [{row["graph"] for row in SearchSpace().sample(60, split)} for split in ("train", "validation", "test")]
    assert sum(map(len, graphs)) == len(set.union(*graphs)) > 100


def test_a_path_goes_on_where_it_arrived_and_nowhere_twice():
    for problem in SearchSpace(min_hops=1, max_hops=6).draw(300, "train"):
        subjects, objects = [fact.subject for fact in problem.path], [fact.object for fact in problem.path]
        assert subjects[1:] == objects[:-1]
        assert len({*subjects, *objects}) == len(problem.path) + 1
        assert len({fact.relation for fact in problem.path}) == len(problem.path)
        row = problem.row()
        assert (row["answer"], row["hops"]) == (objects[-1], len(row["path"]))


def test_a_demonstration_without_mistakes_is_right_and_every_search_of_it_scores():
    for problem in PROBLEMS:
        turns, environment = search_demonstration(problem, random.Random(0)), Search()
        environment.reset(**problem.row())
        assert len(turns) == len(problem.path) + 1
        for said, told in turns[:-1]:
            query = said.removeprefix("<search>").removesuffix("</search>")
            assert told == f"\n<result>{environment.search(query)}</result>\n"
            assert environment.score_turn() == 1.0
        assert turns[-1] == (f"Answer: {problem.path[-1].object}", "")
