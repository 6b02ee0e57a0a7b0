"""Generated text: what the model would say, reproducible, in constant memory, from a self-sufficient folder."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from models import build_model, preset, save_model
from pipelines.generate import generate, main
from pipelines.text_tokenizer import ByteTokenizer
from pipelines.vocabulary import open_tokenizer
from tests.pipelines.settings import settings
from tests.pipelines.toys import Positional


@pytest.fixture
def model():
    return build_model(preset("transformer_pp_tiny", vocab_size=257, layers=1, chunk=16), seed=3).double().eval()


def text(model, tokenizer=None, prompt="Zürich", tokens=30, temperature=0.0, top_k=50, seed=0) -> str:
    return "".join(islice(generate(model, tokenizer or ByteTokenizer(), prompt, temperature, top_k, seed), tokens))


def test_temperature_zero_follows_the_likeliest_token_of_a_full_forward(model):
    prompt = [256, *"Zürich".encode()]
    written = list(prompt)
    for _ in range(30):
        with torch.inference_mode():
            written.append(int(model(torch.tensor([written]))[0, -1].argmax()))
    expected = ByteTokenizer().decoder()
    pieces = [expected.push(token) + "\n\n" * (token == 256) for token in written[len(prompt) :]]
    assert text(model) == "".join(pieces)


class Parrot(Positional):
    """Says the same token whatever it reads."""

    def __init__(self, token: int, vocab_size: int) -> None:
        super().__init__()
        self.says = torch.zeros(vocab_size).index_fill_(0, torch.tensor(token), 1.0)

    def logits(self, tokens, seen):
        return self.says.expand(*tokens.shape, -1)


def test_a_word_after_the_prompt_keeps_its_space():
    mistral = open_tokenizer(settings(data={"tokenizer": "mistral", "vocab_size": 32000}).data)
    assert mistral is not None
    word = int(mistral.encode_batch(["names"])[0][0])  # the piece with its space
    assert text(Parrot(word, mistral.vocab_size), mistral, "a list of", tokens=2) == " names names"
    assert text(Parrot(word, mistral.vocab_size), mistral, "", tokens=2) == "names names"


def test_a_character_is_given_out_whole():
    euro = "\N{EURO SIGN}".encode()
    assert text(Parrot(euro[0], 257), prompt="", tokens=3) == "\N{REPLACEMENT CHARACTER}" * 2
    assert list(islice(generate(Parrot(ord("a"), 257), ByteTokenizer(), "", 0, 1, 0), 2)) == ["a", "a"]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model):
    assert text(model, temperature=1.0, seed=1) == text(model, temperature=1.0, seed=1)
    assert text(model, temperature=1.0, seed=1) != text(model, temperature=1.0, seed=2)


def test_top_k_of_one_is_temperature_zero(model):
    assert text(model, temperature=1.0, top_k=1) == text(model)


def test_command_streams_from_a_folder(tmp_path, capsys, monkeypatch, model):
    save_model(model.float(), tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["generate", "--model", str(tmp_path / "model"), "--prompt", "ab", "--tokens", "5"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ab")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nowhere"], "--model=nowhere"),
        (["--model", ".", "--tokens", "0"], "--tokens=0"),
        (["--model", ".", "--temperature", "-1"], "--temperature=-1.0"),
        (["--model", ".", "--top-k", "0"], "--top-k=0"),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments, named, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["generate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_a_model_without_its_tokenizer_is_refused(tmp_path, capsys, monkeypatch):
    save_model(build_model(preset("transformer_pp_tiny", vocab_size=300, layers=1)), tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["generate", "--model", str(tmp_path / "model")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "257" in capsys.readouterr().err
