"""What a training is part of, where it is part of more than itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Role:
    """A cell's place in a table."""

    name: str | None = None  # of the ledger's run; None lets the stage name it
    tags: Mapping[str, str] = field(default_factory=dict)  # of the ledger's run, beside the training's own
    validated: Callable[[int, float], None] = lambda step, loss: None  # told every held-out loss; may stop the run


ALONE = Role()
