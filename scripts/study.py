"""Run a study: a sweep in which each method has its best point of a grid, and finished runs are rows of a table.

    python scripts/study.py configs/study/baseline.yaml --list
    python scripts/study.py configs/study/baseline.yaml --only '*five_terms*'

The file is that of `python -m grail_lightning.sweep`, with two keys more. With `choose`, each method first runs its
grid on seeds of its own, and reports the other seeds at the best point. `results` names the table.
docs/research/six_methods.md describes both. Called again, the script goes on as the sweep does.
"""

from __future__ import annotations

import json
import shlex
import threading
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from study_tables import curve, read_results

from grail_lightning.app import sweep
from grail_lightning.app.choice import Row, Study, StudyRun, check_choose, study_of
from grail_lightning.app.cli.app import mistakes_in_one_line
from grail_lightning.app.cli.trainer_options import environments_of_runs
from grail_lightning.app.results.differences import CURVE

_WRITING = threading.Lock()
FACTS = ("run", "method", "task", "seed", "point", "choosing", "options")  # The first columns of a table.


class Table(NamedTuple):
    """A table of finished runs: its file, and the tags of its curves."""

    file: Path
    tags: list[str]

    def rows(self) -> dict[str, Row]:
        """The rows by the names of runs; none if there is no file. An error if it has other columns."""
        columns = [*FACTS, *self.tags]
        rows = {row["run"]: row for row in read_results(self.file)} if self.file.exists() else {}
        if other := next((row for row in rows.values() if list(row) != columns), None):
            raise ValueError(
                f"`results.file` must be a table with the columns {', '.join(columns)}, but {self.file} has "
                f"{', '.join(other)}. Name another file, or the curves of that table in `results.curves`."
            )
        return {name: Row(row["options"], {tag: curve(row, tag) for tag in self.tags}) for name, row in rows.items()}

    def add(self, run: StudyRun) -> None:
        """Add a finished run without a row. Several studies may add to one table, and git can merge its lines."""
        if run.row:
            return
        row: dict[str, object] = {"run": run.folder.name, "method": run.method, "task": run.task, "seed": run.seed}
        row |= {"point": run.point, "choosing": run.choosing, "options": shlex.join(run.given)}
        row |= {tag: run.curve(tag) for tag in self.tags}
        cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        with _WRITING:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame([cells]).to_csv(self.file, mode="a", header=not self.file.exists(), index=False)


def read_study(file: Path, output: Path | None = None) -> tuple[Study, Table | None]:
    """The study of a YAML file, and its table if it names one. `output` replaces its `folder`."""
    content = sweep.read_file(file, (*sweep.KEYS, "choose", "results"))
    choose, results, table = check_choose(content), content.get("results"), None
    if results is not None:
        allowed = isinstance(results, dict) and {"file"} <= results.keys() <= {"file", "curves"}
        what = "`results` must hold `file`, and beside it only `curves`, a list"
        sweep.must(allowed and isinstance(results.get("curves", []), list), what, results)
        by = [choose.get("by", CURVE)]
        tags = dict.fromkeys([*results.get("curves", by), *(by if choose else [])])
        table = Table(Path(results["file"]), list(tags))
    rows = table.rows() if table else {}
    return study_of(content, lambda run: rows.get(run.folder.name), output), table


def main(arguments: list[str] | None = None) -> None:
    """Run a study. A user's mistake is one line, with exit code 2; exit code 1 says that runs are not finished."""
    call = sweep.parse_call("python scripts/study.py", (__doc__ or "").partition("\n")[0], arguments)
    with mistakes_in_one_line(__file__):
        study, table = read_study(call.file, call.output)
        runs = study.selected(call)
        for run in runs:
            if not run.waits:
                run.check()
        devices = sweep.check_options([study.first_point(run) for run in runs])
        if call.list:
            for run in runs:
                print(sweep.line_of(run) + (", at the point that will be chosen" if run.waits else ""))
            return
        how = {"when_finished": table.add} if table else {}
        runner = sweep.Runner(environments_of_runs(call.jobs, devices), **how)
        runner.stop_at_signals()
        done = study.run(runs, runner)
        print(sweep.last_words(done, len(runs), len(study.runs)))
    raise SystemExit(not done)


if __name__ == "__main__":
    main()
