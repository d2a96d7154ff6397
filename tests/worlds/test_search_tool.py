"""The world of search: its facts and questions, what a search finds, and the scores of turns."""

import hashlib
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from grail_lightning.worlds.search.environment import Search, fact_graph
from grail_lightning.worlds.search.retrieval import Corpus
from grail_lightning.worlds.search.task import SearchSpace

ROWS = SearchSpace().sample(80, "train")
ROW = next(row for row in ROWS if row["hops"] == 3)
# How a question's relation is searched for, and how its fact is written: read off the module's page, not its tables.
FACTS = {
    "teacher": ("teacher", "The teacher of {} is (.+)."),
    "doctor": ("doctor", "The doctor of {} is (.+)."),
    "home": ("lives", "{} lives in the town (.+)."),
    "employer": ("works", "{} works for the firm (.+)."),
    "founder": ("founded", "The firm {} was founded by (.+)."),
    "seat": ("sits", "The firm {} sits in the town (.+)."),
    "mayor": ("mayor", "The mayor of the town {} is (.+)."),
    "country": ("lies", "The town {} lies in (.+)."),
    "capital": ("capital", "The capital of {} is the town (.+)."),
    "president": ("president", "The president of {} is (.+)."),
}


def searched(row, **options):
    environment = Search(**options)
    assert environment.reset(**row) is None
    return environment


def asked(problem):
    """The relations of a question, the first one to look up first, and the entity it begins with."""
    chain = re.fullmatch(r"(?:Who|Which \w+) is ((?:the \w+ of )+)(.+)\?", problem)
    return re.findall(r"the (\w+) of ", chain[1])[::-1], chain[2]


def test_a_graph_is_the_same_on_every_machine_and_another_one_has_other_facts():
    documents = [fact.document for fact in fact_graph(3).facts]
    # In this graph every fact has one object, nobody teaches two people, and a capital lies in its country.
    assert hashlib.blake2b("\n".join(documents).encode(), digest_size=8).hexdigest() == "c5e8c33fb32dbd83"
    assert len({*documents} & {fact.document for fact in fact_graph(4).facts}) < 5


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


def test_who_follows_the_question_finds_the_path_and_the_answer_and_every_turn_scores():
    for row in ROWS:
        environment, (relations, entity) = searched(row), asked(row["problem"])
        assert len(relations) == row["hops"]
        for hop, relation in enumerate(relations):
            word, form = FACTS[relation]
            result = environment.search(f"{entity.upper()} {word}")
            assert f"- {row['path'][hop]}" in result.split("\n")
            (entity,) = re.findall(f"^- {form.format(entity)}$", result, re.MULTILINE)
            assert environment.score_turn() == 1.0
        assert entity == row["answer"]


def test_a_turn_scores_that_brings_a_new_document_of_the_path_and_none_without_a_path():
    environment, path = searched(ROW, top_k=1), ROW["path"]
    other = next(fact.document for fact in fact_graph(ROW["graph"]).facts if fact.document not in path)

    def score(*queries):
        for query in queries:
            environment.search(query)
        return environment.score_turn()

    turns = [(), path[:1], path[:1], [other], [other, path[1]], path[:2], path]
    assert [score(*queries) for queries in turns] == [None, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    environment.reset(**{**ROW, "path": []})
    assert environment.search(path[0]) != "Nothing was found."
    assert environment.score_turn() is None


def test_the_state_is_the_question_and_the_set_of_documents_and_a_reset_forgets_them():
    one, other = searched(ROW), searched(ROW)
    fresh = one.state_key()
    for document in ROW["path"]:
        one.search(document)
    for document in [*reversed(ROW["path"]), ROW["path"][0]]:
        other.search(document)
    assert one.state_key() == other.state_key() != fresh != searched(ROWS[0]).state_key()
    assert hash(one.state_key()) == hash(other.state_key())
    one.reset(**ROW)
    assert (one.state_key(), one.score_turn()) == (fresh, None)
    one.search(ROW["path"][0])
    assert one.score_turn() == 1.0


def test_options_and_columns_that_are_wrong_are_refused_and_the_number_of_documents_is_limited():
    for k in (1, 2, 5):
        assert searched(ROW, top_k=k).search("the town firm").count("\n") == k - 1
    with pytest.raises(ValueError, match="needs the row's column `graph`, or the option `retriever`"):
        Search().search("x")
    with pytest.raises(ValueError, match="`top_k` must be at least 1"):
        Search(top_k=0)


# ---- hostile queries and threads

DOCUMENTS = "near and or not lies here.", "Tom Lind works for the firm Orbtek.", "Mara Voss lives in Velden."
NONE, FIRST, SECOND, LAST = [], *([document] for document in DOCUMENTS)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("Where does MARA live?", LAST),  # Without regard to case and endings.
        ("Tom's working place", SECOND),
        ('Orbtek" NOT "Orbtek', FIRST),
        ("NEAR(Velden, 5)", LAST),
        ("Vel*", NONE),
        ("text : Velden", LAST),
        ("-Velden ^+", LAST),
        ("'); DROP TABLE documents; --", NONE),
        ("\0\x01\x1a Vel\0den", NONE),
        ("\ud800\udfff Velden", LAST),
        ("_ __ Velden_Velden e\u0301 \u0300 \u200f\u202e", LAST),
        ("Velden " * 200_000, LAST),
        ("x" * 1_000_000, NONE),
        (" ".join(map(chr, range(0x4E00, 0x4F00))), NONE),
        ('"', NONE),
        ("", NONE),
    ],
)
def test_no_query_raises_and_operators_are_plain_words(query, found):
    corpus, rng = Corpus(DOCUMENTS), random.Random(0)
    assert corpus.documents(query, 1) == found
    for top in (0x80, 0x3000, 0x110000) * 20:
        assert corpus.documents("".join(chr(rng.randrange(top)) for _ in range(12)) + " Velden", 1) == LAST


def test_threads_that_share_a_graph_find_what_one_alone_finds():
    queries = [document for other in ROWS[:20] for document in other["path"]]
    expected = [Corpus(fact.document for fact in fact_graph(991).facts).documents(query, 2) for query in queries]

    def play(_):
        environment = searched({**ROW, "graph": 991})
        return [environment.search(query).removeprefix("- ").split("\n- ") for query in queries]

    with ThreadPoolExecutor(4) as pool:
        assert all(results == expected for results in pool.map(play, range(4)))
