"""What a model costs when it runs: state bytes, peak memory, tokens per second, and the machine's own peak.

Special here: state bytes and peak memory are exact and repeatable (bytes counted, not sampled); only the speeds are
timings. All of it is for one sequence, read as in use: a prompt through `extend`, then one token at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from models.language_model import CausalLM, state_bytes
from pipelines.protocol import stream

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler of `peak_memory` narrates its start and stop otherwise

SLICE = 1024  # tokens read at a time where memory is the question: what grows beyond it is the state
PROMPT = 4096  # tokens read at a time where speed is the question: a prompt this long goes in one call
REPEATS = 3  # a prompt is read this often; the fastest counts
PATIENCE = 5.0  # seconds after which a speed is measured enough
DECODED = 128  # tokens generated to measure decoding


def measured_state_bytes(model: CausalLM, tokens: Tensor, contexts: Sequence[int]) -> dict[int, int]:
    """Bytes of the live streaming state of one sequence after each of `contexts` tokens.

    Args:
        tokens: `[T]`, at least as many as the longest context.
        contexts: increasing lengths.
    """
    sizes, start, state = {}, 0, model.init_state(1)
    with torch.inference_mode():
        for context in contexts:
            for part in _row(model, tokens[start:context]).split(SLICE, dim=1):
                _, state = model.extend(part, state)
            start, sizes[context] = context, state_bytes(state)
            stated = model.cost(context).state_bytes
            assert sizes[context] == stated, (
                f"state is {sizes[context]} bytes after {context} tokens, cost() says {stated}"
            )
    return sizes


def peak_memory_bytes(model: CausalLM, tokens: Tensor, slice_tokens: int = SLICE) -> int:
    """Most bytes of tensors alive at once while `tokens [T]` are read as a prompt, the weights included.

    The allocator's count: `torch.cuda.max_memory_allocated` on a GPU, the same sum from the profiler's record of every
    allocation on a CPU. The process needs more than this: interpreter, libraries, and memory kept for reuse.
    """
    prompt = _row(model, tokens)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if prompt.is_cuda:
        before = torch.cuda.memory_allocated(prompt.device)
        torch.cuda.reset_peak_memory_stats(prompt.device)
        _prefill(model, prompt, slice_tokens)
        return weights + torch.cuda.max_memory_allocated(prompt.device) - before
    record: Any = profile(profile_memory=True)
    with record:
        _prefill(model, prompt, slice_tokens)
    alive = peak = 0
    for event in record.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return weights + peak


def prefill_speed(model: CausalLM, tokens: Tensor, slice_tokens: int = PROMPT) -> float:
    """Tokens per second of reading `tokens [T]` as a prompt: the fastest of a few readings."""
    prompt = _row(model, tokens)
    return len(tokens) / _fastest(lambda: _prefill(model, prompt, slice_tokens), prompt.device)


def decode_speed(model: CausalLM, tokens: Tensor) -> float:
    """Tokens per second of greedy generation after the prompt `tokens [T]`: the mean over up to 128 tokens."""
    prompt = _row(model, tokens)
    with torch.inference_mode():
        logits, state = _prefill(model, prompt, PROMPT)
        _synchronise(prompt.device)
        start, count = time.perf_counter(), 0
        while count < DECODED and time.perf_counter() - start < PATIENCE:
            logits, state = model.extend(logits[:, -1:].argmax(-1), state)
            count += 1
        _synchronise(prompt.device)
        return count / (time.perf_counter() - start)


def matmul_flops_per_second(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """FLOPs per second of a large square matrix product: the machine's practical peak.

    A speed is best given as a fraction of it: measured, so right for hardware nobody listed, and of the same threads.
    """
    device = torch.device(device)
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: left @ right, device)


def _prefill(model: CausalLM, prompt: Tensor, slice_tokens: int) -> tuple[Tensor, Any]:
    """The last logits and the state after `prompt [1, T]`."""
    with torch.inference_mode():
        logits, state = None, None
        for logits, state in stream(model, prompt, slice_tokens):  # noqa: B007
            pass
    assert logits is not None
    return logits, state


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of `REPEATS` calls after a first one that warms up; fewer when they take long."""
    begin, best = time.perf_counter(), float("inf")
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        _synchronise(device)
        end = time.perf_counter()
        if repeat > 0 or end - begin > PATIENCE:
            best = min(best, end - start)
        if end - begin > PATIENCE:
            break
    return best


def _row(model: CausalLM, tokens: Tensor) -> Tensor:
    """`[T] -> [1, T]` on the model's device."""
    return tokens[None].to(next(model.parameters()).device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
