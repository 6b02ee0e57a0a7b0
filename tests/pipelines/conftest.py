"""What tests of training share: tiny token data, and an empty ledger (seconds to make, so made once and copied)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.pipelines.token_data import write_token_data
from tests.pipelines.trainings import make_ledger

WORDS = ["the", "memory", "of", "a", "fast", "module", "reads", "every", "patch", "while", "slow", "chunks", "loop"]


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory) -> Path:
    """Token data of bytes: about 24,000 training tokens, 6,000 held out."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=500)) for _ in range(12)]
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    write_token_data(folder, {"train": texts[:10], "held_out": texts[10:]})
    return folder


@pytest.fixture(scope="session")
def _empty_ledger(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("ledger") / "mlflow.db"
    make_ledger(file)
    return file


@pytest.fixture
def ledger_file(_empty_ledger, tmp_path) -> Path:
    """A ledger of its own for one test, without runs."""
    return Path(shutil.copy(_empty_ledger, tmp_path / "mlflow.db"))
