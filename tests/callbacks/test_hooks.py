import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from grail_lightning.callbacks import Evaluation
from tests.callbacks.scripted import run


def test_a_module_of_another_kind_is_refused_by_name():
    with pytest.raises(ValueError, match=r"need a `GrailModule`, but got BoringModel\. Remove them from the trainer"):
        run(1, Evaluation()).fit(BoringModel())
