"""Token credit inside TRL's `GRPOTrainer` (docs/trl.md). A name that is asked for imports TRL (extra `trl`)."""

from typing import TYPE_CHECKING

from grail_lightning._lazy import lazy

if TYPE_CHECKING:
    from grail_lightning.app.trl.trainer import CreditPages, TokenCreditGRPOTrainer, TokenCreditMixin

__all__ = ["CreditPages", "TokenCreditGRPOTrainer", "TokenCreditMixin"]

__getattr__ = lazy(__name__, dict.fromkeys(__all__, "grail_lightning.app.trl.trainer"))


def __dir__() -> list[str]:
    return sorted(__all__)
