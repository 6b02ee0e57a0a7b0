"""Transformer++ against independent implementations, and what its windows and chunks can and cannot see."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from models import build_model, preset
from models.configuration import ConfigError
from models.layers import rope
from models.transformer import Transformer
from tests.models.flops import counted_flops

SMALL = {"vocab_size": 97, "width": 32, "layers": 3, "heads": 4, "hidden": 56}
OURS_TO_THEIRS = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "norm": "model.norm",
    "head": "lm_head",
}


def small_model(**fields) -> Transformer:
    model = build_model(preset("transformer_pp_tiny", **{**SMALL, **fields}))
    assert isinstance(model, Transformer)
    return model


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


def their_name(name: str) -> str:
    return ".".join(OURS_TO_THEIRS.get(part, part) for part in name.split("."))


def reference(model: Transformer, kind: type = LlamaConfig, **extra) -> torch.nn.Module:
    """The `transformers` model of the same shape, holding a copy of our weights."""
    config = model.config
    theirs = AutoModelForCausalLM.from_config(
        kind(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads or config.heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            **extra,
        )
    )
    weights = {their_name(name): tensor for name, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize(
    "fields", [{}, {"kv_heads": 2}, {"kv_heads": 1, "rope_theta": 500.0}, {"tie_embeddings": True}], ids=str
)
def test_equals_llama_in_logits_and_gradients(fields):
    ours, tokens = small_model(**fields), random_tokens(2, 48)
    theirs = reference(ours)
    logits, expected = ours(tokens), theirs(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    loss, _ = ours.training_loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    theirs(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(their_name(name)).grad, rtol=1e-4, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("window", [2, 8, 48])
def test_window_equals_mistral(window):
    ours, tokens = small_model(window=window, kv_heads=2), random_tokens(2, 48)
    theirs = reference(ours, MistralConfig, sliding_window=window)
    torch.testing.assert_close(ours(tokens), theirs(input_ids=tokens).logits, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_chunks_are_sequences_of_their_own():
    ours, tokens = small_model(chunk=16), random_tokens(2, 40)
    theirs = reference(ours)
    expected = torch.cat([theirs(input_ids=chunk).logits for chunk in tokens.split(16, dim=1)], dim=1)
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_block_takes_any_mask_over_cached_and_new_rows():
    model = small_model().double()
    x = torch.randn(2, 10, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(10, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    mask |= torch.eye(10, dtype=torch.bool)
    block, state, tables = model.blocks[0], model.init_state(2), rope(torch.arange(10), 8, 10000.0)
    early, late = ([table[part] for table in tables] for part in (slice(0, 4), slice(4, 10)))
    whole = block(x, tables, mask.tril())
    first = block(x[:, :4], early, mask.tril()[:4, :4], state.caches[0])
    second = block(x[:, 4:], late, mask.tril()[4:], state.caches[0])
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)


@torch.inference_mode()
@pytest.mark.parametrize(("fields", "last_seen_by"), [({}, 39), ({"window": 8}, 17), ({"chunk": 8}, 15)], ids=str)
def test_how_far_a_token_reaches_in_one_layer(fields, last_seen_by):
    model, tokens = small_model(layers=1, **fields), random_tokens(1, 40)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    moved = (model(changed) != model(tokens)).any(dim=-1)[0].nonzero().flatten().tolist()
    assert moved == list(range(10, last_seen_by + 1))


def test_arms_start_from_the_same_weights():
    full, window, chunk, grouped = (
        small_model(**fields).state_dict() for fields in ({}, {"window": 8}, {"chunk": 8}, {"kv_heads": 2})
    )
    for name, tensor in full.items():
        assert torch.equal(window[name], tensor)
        assert torch.equal(chunk[name], tensor)
        assert torch.equal(grouped[name], tensor) or grouped[name].shape != tensor.shape


@pytest.mark.parametrize("fields", [{"window": 16}, {"chunk": 16}], ids=str)
def test_local_attention_costs_the_same_per_token_at_any_length(fields):
    model = small_model(**fields)
    with torch.no_grad():
        short, long = (counted_flops(lambda n=n: model(random_tokens(1, n))) / n for n in (64, 1024))
    assert long == pytest.approx(short)
    assert model.cost(1024).state_bytes == model.cost(64).state_bytes > 0


@torch.inference_mode()
@pytest.mark.parametrize("fields", [{"window": 16}, {"chunk": 16}], ids=str)
def test_local_attention_holds_no_more_memory_after_a_long_prefill(fields):
    model = small_model(**fields)

    def held(length: int) -> int:
        _, state = model.extend(random_tokens(1, length), model.init_state(1))
        return sum(x.untyped_storage().nbytes() for cache in state.caches for x in (cache.keys, cache.values))

    assert held(2047) <= held(63)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 5}, ("heads=5", "width=32")),
        ({"heads": 32}, ("heads=32", "even")),
        ({"kv_heads": 3}, ("kv_heads=3", "heads=4")),
        ({"kv_heads": 0}, ("kv_heads=0",)),
        ({"layers": 0}, ("layers=0",)),
        ({"hidden": 0}, ("hidden=0",)),
        ({"window": 1}, ("window=1", "at least 2")),
        ({"chunk": -4}, ("chunk=-4", "at least 2")),
        ({"window": 8, "chunk": 8}, ("window=8", "chunk=8")),
        ({"rope_theta": 0.0}, ("rope_theta=0",)),
        ({"norm_eps": -1.0}, ("norm_eps=-1",)),
        ({"layer": 2}, ("model.layer", "layers")),
        ({"layers": "two"}, ("layers", "two", "int")),
    ],
    ids=str,
)
def test_impossible_configs_are_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        small_model(**fields)
    for word in words:
        assert word in str(caught.value)
