"""A copy of the project with a small configuration, where stages run for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parent.parent

SMALL = {  # section -> fields, so that every stage takes seconds
    "data": {"documents": 24, "vocab_size": 300, "held_out": 0.25, "shard_tokens": 65536},
    "pretrain": {
        "context": 64,
        "batch_size": 4,
        "tokens": 2048,
        "log_every": 1,
        "validate_every": 4,
        "validation_tokens": 256,
        "checkpoint_every": 2,
    },
    "evaluate": {"contexts": [64, 128], "score_tokens": 32, "windows": 4},
    "distill": {
        "context": 64,
        "batch_size": 2,
        "phase1_steps": 4,
        "phase2_steps": 4,
        "log_every": 1,
        "validate_every": 4,
        "validation_tokens": 256,
        "checkpoint_every": 2,
    },
    "models": {
        "transformer_pp_tiny": {},
        "mela_tiny": {"h_cycles": 2, "l_cycles": 1, "text_chunk": 16, "memory_tokens": 2, "memory_chunk": 4},
        "looplm_tiny": {"loops": 2},
    },
    "students": {"melt_tiny": {"loops": 2, "chunk": 16}},
    "execution": {"threads": 1, "workers": 1},
}


def make_workspace(folder: Path) -> Path:
    """Copy the tracked files to `folder`, shrink `params.yaml`, commit; returns the folder."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in tracked.stdout.splitlines():
        if (PROJECT / name).is_file() and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    for section, fields in SMALL.items():
        params[section] = fields if section in ("models", "students") else params[section] | fields
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "Small copy"]):
        subprocess.run(
            ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", *command], cwd=folder, check=True
        )
    return folder


def environment() -> dict[str, str]:
    """This environment with the interpreter's own folder first on the path, as an activated one has it."""
    names = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    fields = [f"GIT_{role}_{field}" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | names | dict.fromkeys(fields, "test@example.org")


def shell(command: str, folder: Path, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    """Run a shell command in the copy and return what it said; the exit code is the caller's to judge."""
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout
    )
