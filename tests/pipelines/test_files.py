"""A written file is whole or absent, whatever interrupts the writing."""

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import files


def test_text_and_json_come_back(tmp_path: Path) -> None:
    files.write_text(tmp_path / "deep" / "er" / "a.txt", "é\n\u2028x")
    files.write_json(tmp_path / "a.json", {"b": [1, 2.5, None], "ü": "ж"})
    assert (tmp_path / "deep" / "er" / "a.txt").read_bytes() == "é\n\u2028x".encode()
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == {"b": [1, 2.5, None], "ü": "ж"}


def test_an_error_keeps_the_earlier_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    files.write_json(target, 1)
    with pytest.raises(TypeError), files.atomic_path(target) as temporary:
        temporary.write_text(b"not text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(target, float("nan"))
    assert target.read_text() == "1\n"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_keeps_the_earlier_file(tmp_path: Path) -> None:
    """A real ENOSPC-like failure: the kernel refuses to let the file grow."""
    target = tmp_path / "result.txt"
    files.write_text(target, "earlier")
    script = f"""
import resource, signal
from pipelines.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_text({str(target)!r}, "x" * 100_000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"[Errno {errno.EFBIG}]" in done.stderr
    assert target.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [target]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    files.write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert files.sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()
