"""The world of search: its facts, what a search finds, and the scores of turns."""

import hashlib
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers.utils import get_json_schema

from grail_lightning.environments.facts import GraphSize, fact_graph
from grail_lightning.environments.retrieval import Corpus
from grail_lightning.environments.search import Search
from grail_lightning.tasks import SearchSpace

ROWS = SearchSpace().sample(150, "train")
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


# ---- facts


def test_a_graph_is_the_same_on_every_machine_and_another_one_for_another_seed():
    documents = ["\n".join(fact.document for fact in fact_graph(seed, GraphSize()).facts) for seed in (3, 4)]
    digest = hashlib.blake2b(documents[0].encode(), digest_size=8).hexdigest()
    assert (digest, documents[0].count("\n") + 1) == ("c5e8c33fb32dbd83", 176)
    assert len(set(documents[0].split("\n")) & set(documents[1].split("\n"))) < 5


def test_every_fact_has_one_object_and_people_teach_nobody_or_one_other():
    graph = fact_graph(5, GraphSize(people=30, firms=5, towns=9, countries=4))
    facts = {name: {} for name in FACTS}
    for fact in graph.facts:
        (name,) = [n for n, (_, form) in FACTS.items() if re.fullmatch(form.format(fact.subject), fact.document)]
        assert fact.subject not in facts[name]
        facts[name][fact.subject] = re.fullmatch(FACTS[name][1].format(fact.subject), fact.document)[1]
    assert [len(facts[name]) for name in FACTS] == [30, 30, 30, 30, 5, 5, 9, 9, 4, 4]
    for name in ("teacher", "doctor"):
        assert set(facts[name]) == set(facts[name].values())
        assert all(a != b for a, b in facts[name].items())
    assert all(facts["country"][town] == country for country, town in facts["capital"].items())


@pytest.mark.parametrize(
    "size", [{"people": 121}, {"people": 11}, {"towns": 3}, {"firms": 1}, {"countries": 8.5}, {"firms": "many"}]
)
def test_graphs_without_enough_names_or_people_are_refused(size):
    with pytest.raises(ValueError, match="A graph must have 2 to 120 `people`"):
        GraphSize(**size)


# ---- questions and searches


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


def test_a_query_in_a_persons_words_finds_the_document_without_regard_to_case_and_endings():
    corpus = Corpus(["Mara Lind lies here.", "Tom Lind works for the firm Orbtek.", "Mara Voss lives in Velden."])
    assert corpus.documents("Where does MARA live?", 1) == ["Mara Voss lives in Velden."]
    assert corpus.documents("Tom's working place", 1) == ["Tom Lind works for the firm Orbtek."]


def test_scores_are_those_of_an_independent_count():
    rng, counts = random.Random(0), {0.0: 0, 1.0: 0, None: 0}
    for row in ROWS:
        environment, before = searched(row), set()
        for _ in range(5):
            found = set()
            for _ in range(rng.choice([0, 1, 1, 2])):
                pool = row["path"] + [fact.document for fact in fact_graph(row["graph"]["seed"], GraphSize()).facts[:4]]
                result = environment.search(" ".join(rng.sample(rng.choice(pool).split(), 3)))
                found |= {line[2:] for line in result.split("\n")}
            expected = None if not found else float(bool((found - before) & set(row["path"])))
            assert environment.score_turn() == expected
            counts[expected] += 1
            before |= found
    assert min(counts.values()) > 50


def test_a_turn_without_a_search_and_a_row_without_a_path_have_no_score():
    environment = searched(ROW)
    assert environment.score_turn() is None
    environment.reset(**{**ROW, "path": []})
    assert environment.search(ROW["path"][0]) != "Nothing was found."
    assert environment.score_turn() is None


def test_a_reset_forgets_what_was_found():
    environment = searched(ROW)
    fresh = environment.state_key()
    environment.search(ROW["path"][0])
    assert environment.state_key() != fresh
    environment.reset(**ROW)
    assert (environment.state_key(), environment.score_turn()) == (fresh, None)
    environment.search(ROW["path"][0])
    assert environment.score_turn() == 1.0


def test_the_state_is_the_question_and_the_set_of_documents():
    one, other = searched(ROW), searched(ROW)
    for document in ROW["path"]:
        one.search(document)
    for document in [*reversed(ROW["path"]), ROW["path"][0]]:
        other.search(document)
    assert one.state_key() == other.state_key()
    assert len({one.state_key(), other.state_key()}) == 1
    assert searched(ROW).state_key() != searched(ROWS[0]).state_key()


def test_the_number_of_documents_is_limited_and_a_search_may_find_none():
    for k in (1, 2, 5):
        assert searched(ROW, top_k=k).search("the town firm").count("\n") == k - 1
    assert searched(ROW).search("nosuchword") == "Nothing was found."


def test_columns_that_cannot_be_read_are_refused():
    for graph in ({}, {"seed": "3"}, {"seed": 3, "rivers": 2}):
        with pytest.raises(ValueError, match="column `graph` must have a whole number as `seed`"):
            Search().reset(problem="?", graph=graph)
    with pytest.raises(ValueError, match="needs the row's column `graph`, or the option `retriever`"):
        Search().search("x")
    with pytest.raises(ValueError, match="top_k >= 1"):
        Search(top_k=0)


def test_the_tool_has_the_schema_that_trl_reads():
    schema = get_json_schema(Search().search)["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("search", ["query"])
    assert schema["parameters"]["properties"]["query"]["type"] == "string"
    public = {name for name in vars(Search) if not name.startswith("_")}
    assert public == {"reset", "search", "score_turn", "state_key"}


# ---- hostile queries and threads


@pytest.mark.parametrize(
    "query",
    [
        "",
        '"',
        '"""" OR ""',
        "NEAR(a b, 5)",
        "text : lives",
        "-lives NOT works AND",
        "lives*",
        "^lives + works",
        "{text} : x",
        "'); DROP TABLE documents; --",
        "\0\x01\x1a",
        "a\0b",
        "\ud800\udfff lives",
        "_ __ a_b",
        "e\u0301 \u0300 \u200f\u202e",
        "lives " * 200_000,
        "x" * 1_000_000,
        " ".join(map(chr, range(0x4E00, 0x4F00))),
        "\U000e0001½²ⅷ٣",
    ],
)
def test_no_query_raises_or_changes_the_documents(query):
    environment = searched(ROW)
    assert isinstance(environment.search(query), str)
    assert ROW["path"][0] in environment.search(ROW["path"][0])


def test_operators_in_a_query_are_plain_words():
    corpus = Corpus(["near and or not", "alpha", "beta gamma"])
    assert set(corpus.documents('alpha" NOT "alpha', 3)) == {"near and or not", "alpha"}
    assert set(corpus.documents("NEAR(alpha)", 3)) == {"near and or not", "alpha"}
    assert corpus.documents("alp*", 3) == []
    assert corpus.documents("text:beta", 3) == ["beta gamma"]


def test_random_characters_do_not_raise():
    rng, corpus = random.Random(0), Corpus(["alpha beta"])
    for _ in range(3000):
        top = rng.choice([0x80, 0x3000, 0x110000])
        assert corpus.documents("".join(chr(rng.randrange(top)) for _ in range(12)) + " alpha", 1) == ["alpha beta"]


def test_threads_that_share_a_graph_find_what_one_alone_finds():
    row = {**ROW, "graph": {"seed": 991}}
    queries = [document for other in ROWS[:40] for document in other["path"]]
    alone = searched({**row, "graph": {"seed": 991, "people": 32}})
    expected = [alone.search(query) for query in queries]

    def play(_):
        environment = searched({**row, "graph": {"seed": 991, "towns": 12}})
        return [environment.search(query) for query in queries]

    with ThreadPoolExecutor(8) as pool:
        assert all(results == expected for results in pool.map(play, range(8)))
