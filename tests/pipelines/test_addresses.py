"""No password is ever shown."""

import pytest

from pipelines.addresses import masked


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql+psycopg2://me:secret@host:5432/sweeps", "postgresql+psycopg2://***@host:5432/sweeps"),
        ("https://secret-token@host", "https://***@host"),
        ("http://me:se@cret@host/path", "http://***@host/path"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////tmp/queue.db", "sqlite:////tmp/queue.db"),
        ("runs/sweeps/layers.journal", "runs/sweeps/layers.journal"),
    ],
)
def test_user_and_password_are_masked_and_nothing_else(address, shown):
    assert masked(f"cannot open {address}: me@home is away") == f"cannot open {shown}: me@home is away"
