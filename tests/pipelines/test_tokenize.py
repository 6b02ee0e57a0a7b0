"""The stage gives one result, bit for bit, whatever interrupts it; a failure leaves earlier data whole."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from filelock import FileLock

from models.configuration import ConfigError
from pipelines import blocks, encoding, tokenize
from pipelines.config import PipelineConfig, StageError
from pipelines.data import TokenData
from tests.pipelines.settings import PARAMS, settings

ROOT = Path(__file__).parents[2]
SENTENCES = [f"Sentence {i} says that {i * i % 97} is not {i % 13}; naïve — but ünïque. " for i in range(997)]
SMALL_BLOCKS = 20_000

# Runs the stage in a process of its own, for tests that kill or restrict it. Arguments: changes of the settings.
SCRIPT = f"""
import json, resource, signal, sys
from pipelines import blocks, tokenize
from tests.pipelines.settings import PARAMS, settings
if __name__ == "__main__":
    blocks.BLOCK = {SMALL_BLOCKS}
    changes, largest_file = json.loads(sys.argv[1]), int(sys.argv[2])
    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    tokenize.run(settings(**changes))
    if sys.platform == "linux":
        print(open("/proc/self/status").read())
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents, 1.4 MB: 70 small blocks."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    texts = ["".join(SENTENCES[i * 7 % 997 : i * 7 % 997 + i % 200 + 1]) + str(i) for i in range(300)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return file


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", SMALL_BLOCKS)


def changes(folder: Path, corpus: Path, workers: int = 1, **data: Any) -> dict[str, Any]:
    data = {"corpus": "files", "paths": [str(corpus)], "tokenizer": "bpe", "vocab_size": 300, **data}
    return {
        "data": {"directory": str(folder / "tokens"), "shard_tokens": 100_000, **data},
        "execution": {"workers": workers, "checkpoints": str(folder / "checkpoints")},
    }


def configured(folder: Path, corpus: Path, workers: int = 1, **data: Any) -> PipelineConfig:
    return settings(**changes(folder, corpus, workers, **data))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "tokens").iterdir())}


def start(values: dict[str, Any], largest_file: int = 0, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(values), str(largest_file)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an uninterrupted run with one worker."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", SMALL_BLOCKS)
        tokenize.run(configured(folder, corpus))
    return contents(folder)


def test_the_texts_come_back_from_the_tokens(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = tokenize.run(configured(tmp_path, corpus, held_out=0.25))
    data = TokenData.open(tmp_path / "tokens")
    texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
    found = {
        split: [data.tokenizer.decode(document) for document in data.documents(split)] for split in index["splits"]
    }
    assert sorted(found["train"] + found["held_out"]) == sorted(texts)
    assert found["train"] == [text for text in texts if text in found["train"]], "the corpus's order is kept"
    assert len(found["held_out"]) == 75
    assert index["digest"] == data.digest
    assert data.vocab_size == 300
    assert list((tmp_path / "checkpoints").iterdir()) == list((tmp_path / "checkpoints").glob("*.lock"))
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.startswith("tokenize: 225 training and 75 held-out documents, ")
    longest = max(len(document) - 1 for document in data.documents("held_out"))
    assert f"of 4,096 tokens or more, the longest of {longest:,}; " in summary


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_change_nothing(corpus: Path, reference: dict[str, bytes], tmp_path: Path, workers: int) -> None:
    tokenize.run(configured(tmp_path, corpus, workers))
    assert contents(tmp_path) == reference
    assert sum(name.startswith("train-") for name in reference) > 3


def test_killed_and_run_again_is_the_same_and_redoes_nothing(
    corpus: Path, reference: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(changes(tmp_path, corpus, workers=2))
    while len(done := list(tmp_path.glob("checkpoints/tokenize-*/[!.]*.npz"))) < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "tokens" / "index.json").exists()
    assert not psutil.wait_procs(workers, timeout=20)[1], "workers end when their parent is killed"

    done = {file: file.stat().st_mtime_ns for file in done}
    keep = SimpleNamespace(rmtree=lambda folder: None)
    monkeypatch.setattr(tokenize, "shutil", keep)
    tokenize.run(configured(tmp_path, corpus, workers=3))
    assert contents(tmp_path) == reference
    assert {file: file.stat().st_mtime_ns for file in done} == done


def test_a_changed_corpus_is_never_mixed_with_unfinished_work(
    corpus: Path, reference: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings, another text in the same file: only blocks of the same text are taken over."""
    moving = tmp_path / "corpus.jsonl"
    moving.write_text(corpus.read_text("utf-8").replace("naïve", "naive"), "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "write_tokens", _fail)
        with pytest.raises(OSError, match="No space left"):
            tokenize.run(configured(tmp_path, moving))
    moving.write_bytes(corpus.read_bytes())
    tokenize.run(configured(tmp_path, moving))
    assert contents(tmp_path) == reference


def _fail(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("largest_file", [30_000, 150_000])
def test_a_full_disk_leaves_the_earlier_data(tmp_path: Path, corpus: Path, largest_file: int) -> None:
    """The kernel refuses to let a file grow: a block of a worker (40 kB), or a shard (200 kB)."""
    tokenize.run(configured(tmp_path, corpus, documents=4, tokenizer="bytes", vocab_size=257))
    earlier = contents(tmp_path)
    process = start(changes(tmp_path, corpus, tokenizer="bytes", vocab_size=257), largest_file)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "File too large" in errors
    assert contents(tmp_path) == earlier
    assert not list(tmp_path.rglob(".*"))
    TokenData.open(tmp_path / "tokens")


def test_other_settings_replace_the_data_whole(tmp_path: Path, corpus: Path, reference: dict[str, bytes]) -> None:
    tokenize.run(configured(tmp_path, corpus, tokenizer="mistral", vocab_size=32000, shard_tokens=20_000))
    many = contents(tmp_path)
    tokenize.run(configured(tmp_path, corpus))
    assert contents(tmp_path) == reference
    assert set(many) - set(reference), "files of the earlier data are gone"


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path, corpus: Path) -> None:
    config = configured(tmp_path, corpus, documents=4, tokenizer="bytes", vocab_size=257)
    tokenize.run(config)
    (lock,) = (tmp_path / "checkpoints").glob("*.lock")
    with FileLock(lock), pytest.raises(StageError, match="another process is tokenizing into"):
        tokenize.run(config)
    tokenize.run(config)


def test_a_killed_worker_is_one_clear_line(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_encode", _die)
    with pytest.raises(StageError, match="a worker was killed"):
        tokenize.run(configured(tmp_path, corpus, documents=4, tokenizer="bytes", vocab_size=257))


def _die(block: blocks.Block, file: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, corpus: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for data, message in [
        ({"paths": [str(empty)]}, "empty"),
        ({"paths": [str(tmp_path / "*.md")]}, "matches no file"),
        ({"tokenizer": "bytes"}, "vocab_size=300 must be 257"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tokenize.run(configured(tmp_path, corpus, **data))
    assert not (tmp_path / "tokens").exists()
    assert not list((tmp_path / "checkpoints").glob("tokenize-*-*"))


def test_the_command_line_tells_success_and_mistakes_apart(tmp_path: Path, corpus: Path) -> None:
    params = yaml.safe_load(PARAMS.read_text("utf-8"))
    params |= {"defaults": [{"model": "transformer_pp_tiny"}, "_self_"], "models": {"transformer_pp_tiny": {}}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "corpus.jsonl").write_bytes(corpus.read_bytes())

    def stage(*overrides: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pipelines.tokenize", "data.corpus=files", *overrides]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, (done.stderr or done.stdout).splitlines()[-1]

    assert stage("data.paths=[nothing.txt]") == (2, "error: data.paths: 'nothing.txt' matches no file")
    code, line = stage("data.paths=[corpus.jsonl]", "data.vocab_size=300")
    assert code == 0
    assert line.endswith("-> data/tokens")
    assert TokenData.open(tmp_path / "data" / "tokens").vocab_size == 300


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory from Linux's /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A text file of 32 MB is one document; reading it takes no more memory than one of 4 MB."""
    (tmp_path / "other.txt").write_text("another document")
    peaks = []
    for megabytes in (4, 32):
        with open(tmp_path / "large.txt", "wb") as file:
            for part in range(megabytes * 10):  # like English: a character that is not Latin-1 now and then
                file.write(b"The memory holds it. " * (4700 + part % 7) + "—".encode() * (part % 17 == 0))
        process = start(changes(tmp_path, tmp_path / "*.txt", tokenizer="bytes", vocab_size=257))
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        peaks.append(int(output.split("VmHWM:")[1].split()[0]) / 1024)
    assert peaks[1] < peaks[0] + 24, f"peak: {peaks[0]:.0f} MiB at 4 MB, {peaks[1]:.0f} MiB at 32 MB"


def test_blocks_are_small_whatever_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker holds at a time: a block, of one long document or of many tiny ones."""
    monkeypatch.undo()
    long = list(blocks.fill([("train", ["x" * 10_000_000])]))
    tiny = list(blocks.fill(("train", ["x"]) for _ in range(100_000)))
    assert max(block.size for block in long) <= blocks.BLOCK + blocks.PIECE
    assert max(len(block.pieces) for block in tiny) * blocks.OVERHEAD <= blocks.BLOCK + blocks.OVERHEAD
