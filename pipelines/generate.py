"""Text from a trained model, printed as it comes, in memory that does not grow with the text for Mela.

python -m pipelines.generate --model artifacts/mela_tiny --prompt "Returns a list of" --tokens 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from models import load_model
from models.configuration import require
from models.language_model import CausalLM
from models.serialization import CheckpointError
from pipelines.command import guarded
from pipelines.config import StageError
from pipelines.text_tokenizer import Tokenizer, load_tokenizer

PROMPT_TOKENS = 4096  # tokens of the prompt given to the model per call


def generate(
    model: CausalLM, tokenizer: Tokenizer, prompt: str, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    """Endless text after `prompt`, piece by piece; a document that the model ends is followed by a new one.

    Args:
        temperature: of the softmax; 0 takes the likeliest token.
        top_k: sample among this many likeliest tokens.
        seed: of the sampling.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = tokenizer.decoder()
    tokens = torch.tensor([[tokenizer.separator, *map(int, tokenizer.encode_batch([prompt])[0])]])
    for token in tokens[0].tolist():  # the caller has the prompt; what follows goes on with it
        decoder.push(token)
    state = model.init_state(1)
    logits = torch.empty(0)
    with torch.inference_mode():
        for piece in tokens.split(PROMPT_TOKENS, dim=1):
            logits, state = model.extend(piece, state)
        while True:
            token = _sample(logits[0, -1].float(), temperature, top_k, generator)
            yield decoder.push(token) + ("\n\n" if token == tokenizer.separator else "")
            logits, state = model.extend(torch.tensor([[token]]), state)


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token drawn from `logits [V]`."""
    if temperature == 0:
        return int(logits.argmax())
    best = logits.topk(min(top_k, len(logits)))
    drawn = torch.multinomial((best.values / temperature).softmax(-1), 1, generator=generator)
    return int(best.indices[drawn])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.generate", description="Stream text from a model.")
    parser.add_argument("--model", required=True, type=Path, help="folder that pretrain or distill wrote")
    parser.add_argument("--prompt", default="", help="text to go on with")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="sample among this many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    sys.exit(guarded(lambda: _stream(arguments)))


def _stream(arguments: argparse.Namespace) -> None:
    require(arguments.tokens >= 1, f"--tokens={arguments.tokens} must be at least 1")
    require(arguments.temperature >= 0, f"--temperature={arguments.temperature} must be at least 0")
    require(arguments.top_k >= 1, f"--top-k={arguments.top_k} must be at least 1")
    require(arguments.threads >= 1, f"--threads={arguments.threads} must be at least 1")
    require(arguments.model.is_dir(), f"--model={arguments.model} is no folder; train a model first")
    torch.set_num_threads(arguments.threads)
    try:
        model = load_model(arguments.model).eval()
    except CheckpointError as error:
        raise StageError(str(error)) from None
    tokenizer = _tokenizer(arguments.model)
    require(
        tokenizer.vocab_size == model.config.vocab_size,
        f"--model={arguments.model}: its tokenizer has {tokenizer.vocab_size} entries, the model "
        f"{model.config.vocab_size}",
    )
    print(arguments.prompt, end="", flush=True)
    pieces = generate(model, tokenizer, arguments.prompt, arguments.temperature, arguments.top_k, arguments.seed)
    for _ in range(arguments.tokens):
        print(next(pieces), end="", flush=True)
    print()


def _tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that lies beside the weights; a model of bytes has no file."""
    files = sorted(folder.glob("tokenizer.*"))
    return load_tokenizer(files[0] if files else None)


if __name__ == "__main__":
    main()
