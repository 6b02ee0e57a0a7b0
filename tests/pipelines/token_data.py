"""Token data for tests, made without the stage and its processes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.blocks import encode, fill
from pipelines.data import TokenData
from pipelines.shards import write_tokens
from pipelines.text_tokenizer import ByteTokenizer, Tokenizer


def write_token_data(
    directory: Path,
    documents: Mapping[str, Sequence[str]],
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = 1 << 20,
) -> TokenData:
    """`{"train": [text, ...], "held_out": [text, ...]}` as token data in `directory`; bytes unless told otherwise."""
    tokenizer = tokenizer or ByteTokenizer()
    work = directory.parent / f".{directory.name}-blocks"
    work.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[Path]] = {split: [] for split in documents}
    for block in fill((split, [text]) for split, texts in documents.items() for text in texts):
        files[block.split].append(work / block.file_name(tokenizer.digest))
        encode(block, tokenizer, files[block.split][-1])
    write_tokens(files, tokenizer, {"kind": "test"}, shard_tokens, directory)
    return TokenData.open(directory)
