"""One short test for all files here."""

import pytest

from tests.app.results.tested import run_test
from tests.draws import without_ties


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A test that nothing interrupts: its folder, its figures, and the table that it printed."""
    folder, said = tmp_path_factory.mktemp("undisturbed"), []
    with pytest.MonkeyPatch.context() as patch, without_ties():
        patch.setattr("builtins.print", lambda *words, **how: said.append(" ".join(map(str, words))))
        figures = run_test(folder)
    return folder, figures, said[-1]
