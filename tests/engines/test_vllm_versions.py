import configparser
import importlib.util
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import grail_lightning
from grail_lightning.engines.vllm.versions import CEILING, FLOOR, check_release, check_vllm

SETUP = Path(grail_lightning.__file__).parents[1] / "setup.cfg"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(ValueError, match=rf'not installed. Install it: pip install "vllm>={FLOOR},<{CEILING}"'):
        check_vllm()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0.dev1", "1.0"])
def test_older_and_newer_releases_are_refused(version):
    with pytest.raises(ValueError, match=rf"needs vLLM from 0.32 to before 0.34, but got {version}"):
        check_release(Version(version), "`VLLMEngine`", "Install another.")


def test_releases_with_the_interface_are_accepted():
    def accepted(version):
        with suppress(ValueError):
            check_release(Version(version), "`VLLMEngine`", "Install another.")
            return True
        return False

    versions = ["0.31.9", "0.32.0", "0.32.1+cu129", "0.33.0rc1", "0.34.0.dev1"]
    assert [version for version in versions if accepted(version)] == versions[1:-1]


def test_the_extra_asks_for_the_same_releases():
    config = configparser.ConfigParser()
    config.read(SETUP)
    (line,) = [line for line in config["options.extras_require"]["vllm"].splitlines() if line.startswith("vllm")]
    assert {str(part) for part in Requirement(line).specifier} == {f">={FLOOR}", f"<{CEILING}"}
