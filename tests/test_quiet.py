"""A run says what its user needs, and nothing that nobody can do anything about."""

import io
import logging
import time
import warnings

import pytest

from grail_lightning.runtime.quiet import HeldMessages, leave_out_leaf_spec
from tests.runs import batches, module, trainer
from tests.shell import SHORT, main


def test_a_run_says_nothing_of_advertisements_tpus_defaults_and_a_model_of_one_row(
    caplog, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    main(["fit", *SHORT, "--evaluation.at_start=false"])
    said = caplog.text + "".join(capsys.readouterr())
    for noise in ("Tip:", "litlogger", "TPU", "weights_only", "Trainable params"):
        assert noise not in said
    for needed in ("GPU available", "Wrote the policy (step 2)", "held-out accuracy"):
        assert needed in said


def _fit_with_leaf_spec_as_an_error(leave_out):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", r"`isinstance\(treespec, LeafSpec\)", FutureWarning)
        leave_out()
        trainer(1).fit(module(), batches(1))


def test_lightnings_own_deprecation_is_left_out_of_runs_from_python():
    _fit_with_leaf_spec_as_an_error(leave_out_leaf_spec)
    with pytest.raises(FutureWarning, match="LeafSpec"):  # Once this no longer comes, neither is needed any more.
        _fit_with_leaf_spec_as_an_error(lambda: None)


def _console(monkeypatch):
    """A logger with a handler on a console that can be read."""
    console = io.StringIO()
    monkeypatch.setattr("sys.stderr", console)
    logger = logging.getLogger("tests.held")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(console)])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: console.write(f"{message}\n"))
    return logger, console


def _say(logger):
    logger.warning("a message")
    with warnings.catch_warnings():
        warnings.filterwarnings("always", "a warning")
        warnings.warn("a warning", stacklevel=1)


def test_held_messages_come_in_their_order_when_they_are_released(monkeypatch):
    logger, console = _console(monkeypatch)
    held = HeldMessages()
    with held.until_released():
        _say(logger)
        assert console.getvalue() == ""
        held.release()
        assert console.getvalue() == "a message\na warning\n"
        _say(logger)
        assert console.getvalue() == "a message\na warning\n" * 2
    _say(logger)
    assert console.getvalue() == "a message\na warning\n" * 3


@pytest.mark.parametrize(("end", "said"), [(SystemExit(2), ""), (RuntimeError(), "a message\na warning\n")])
def test_a_mistake_drops_held_messages_and_a_fault_does_not(end, said, monkeypatch):
    logger, console = _console(monkeypatch)

    def run():
        with HeldMessages().until_released():
            _say(logger)
            raise end

    with pytest.raises(type(end)):
        run()
    assert console.getvalue() == said


def test_a_run_that_waits_still_says_so(monkeypatch):
    logger, console = _console(monkeypatch)
    with HeldMessages(patience=0.05).until_released():
        _say(logger)
        end = time.monotonic() + 10
        while not console.getvalue().endswith("a warning\n") and time.monotonic() < end:
            time.sleep(0.01)
        assert console.getvalue() == "a message\na warning\n"


def test_a_run_that_waits_for_other_processes_says_so_at_once(monkeypatch):
    logger, console = _console(monkeypatch)
    with HeldMessages().until_released():
        _say(logger)
        logger.warning("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2")
        assert console.getvalue().splitlines()[2].startswith("Initializing distributed")
