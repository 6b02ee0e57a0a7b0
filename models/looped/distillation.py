"""From a LoopLM teacher to a MELT student: what the two phases minimise, over whole sequences, chunk by chunk.

Special here:
- the frozen teacher runs chunk by chunk beside the student, with its caches; of a sequence only the states after each
  loop are kept, so that each loop's predictions are compared once and one gradient of the head is held per loop;
- phase 1 interpolates `KV = a * KV_melt + (1 - a) * KV_base`, where KV_base are the teacher's keys and values **of the
  same loop**, for all tokens so far: a=0 is the teacher, a=1 is MELT. The loss is the divergence from the teacher's
  predictions, averaged over all loops;
- phase 2 adds `beta * ||o - sg(o_teacher)||^2` on the attended values, mean over tokens, layers and loops.

Source: MELT, section 3.3 and appendix C. Our assumptions: KV_base is the teacher's, a is linear in the step, divergence
at temperature 1, attended values before the output projection.

Shapes: `B` batch, `T` tokens, `R` loops, `N` layers, `D` width, `G` key/value heads, `K` head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.configuration import require
from models.looped import head_losses
from models.looped.looped_model import LoopedConfig, Trace
from models.looped.looplm import LoopLM, LoopLMState
from models.looped.melt import Base, Chunks, KeysValues, Melt


@dataclass(frozen=True)
class Objective:
    """What one step minimises."""

    weight: float = 1.0  # a: share of the student's own keys and values; 1 needs no teacher's
    every_loop: bool = True  # divergence of every loop, else of the last
    alignment: float = 0.0  # beta


@dataclass
class Distilled:
    """The loss of one batch, and its parts without gradient."""

    loss: Tensor
    divergence: Tensor  # `[R]`, or `[1]` of the last loop alone: nats per token
    alignment: Tensor  # 0 where it was not asked for
    gates: Tensor  # `[R - 1, N, 2]`: mean and mean square of z, by loop (from the second) and layer

    def scalars(self) -> dict[str, Tensor]:
        """What to log: `divergence/loop_1`, `alignment`, `gate/loop_2/layer_1/mean` and `.../std`."""
        first = self.gates.shape[0] + 2 - len(self.divergence)
        named = {f"divergence/loop_{first + i}": value for i, value in enumerate(self.divergence)}
        named["alignment"] = self.alignment
        for loop, layers in enumerate(self.gates, start=2):
            for layer, (mean, square) in enumerate(layers, start=1):
                named[f"gate/loop_{loop}/layer_{layer}/mean"] = mean
                named[f"gate/loop_{loop}/layer_{layer}/std"] = (square - mean.square()).clamp(min=0).sqrt()
        return named


def require_pair(student: LoopedConfig, teacher: LoopedConfig, same_loops: bool) -> None:
    """`ConfigError` unless the student can start from the teacher.

    Args:
        same_loops: whether loops are compared one by one: interpolation, divergence of all loops, alignment.
    """
    for name in ("vocab_size", "width", "layers", "heads", "hidden", "rope_theta", "norm_eps"):
        ours, theirs = getattr(student, name), getattr(teacher, name)
        require(ours == theirs, f"model.{name}={ours} does not match the teacher's {name}={theirs}")
    require(
        teacher.groups % student.groups == 0,
        f"model.kv_heads={student.groups} must divide the teacher's {teacher.groups} key/value heads",
    )
    require(
        not same_loops or student.loops == teacher.loops,
        f"model.loops={student.loops} does not match the teacher's loops={teacher.loops}, which interpolation, "
        "the divergence of all loops and alignment compare one by one",
    )


@torch.no_grad()
def start_from(student: Melt, teacher: LoopLM) -> None:
    """Copy the teacher's weights into the student; its memory gates keep their own.

    Where the student has fewer key/value heads, each takes the mean of a group of the teacher's (as GQA does).
    """
    ours = student.state_dict()
    for name, weight in teacher.state_dict().items():
        if name in ours:  # a student of one loop has no exit gate
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                heads = weight.unflatten(0, (teacher.config.groups, -1))[None]
                weight = pool_heads(heads, student.config.groups)[0].flatten(0, 1)
            ours[name].copy_(weight)


def pool_heads(x: Tensor, groups: int) -> Tensor:
    """`[B, G, ..., K] -> [B, groups, ..., K]`: the mean of each group of G / groups neighbouring heads."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).mean(2)


def interpolation_weight(step: int, steps: int) -> float:
    """a at `step` of `steps` in phase 1: 0 at the first, 1 at the last."""
    return 1.0 if steps == 1 else step / (steps - 1)


def base_rows(state: LoopLMState, groups: int) -> list[list[KeysValues]]:
    """The teacher's keys and values by loop and layer, for all tokens so far, in the student's number of heads."""
    return [
        [(pool_heads(keys, groups), pool_heads(values, groups)) for keys, values in (cache.tensors() for cache in loop)]
        for loop in state.caches
    ]


def alignment(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """`||o - sg(o_teacher)||^2`, the sum over features, mean over tokens, layers and loops; each `[B, T, D]`."""
    pairs = zip(student, teacher, strict=True)
    return torch.stack([(ours - theirs.detach()).square().sum(-1).mean() for ours, theirs in pairs]).mean()


def distill(student: Melt, teacher: LoopLM, tokens: Tensor, objective: Objective) -> Distilled:
    """Loss of `tokens [B, T]` under one objective; gradients reach the student alone."""
    config = student.config
    rows, state = [Chunks()] * config.layers, teacher.init_state(len(tokens))
    compared = slice(None) if objective.every_loop else slice(-1, None)
    ours, theirs, alignments, gates = [], [], [], []
    for chunk in student.chunks(tokens):
        share = chunk.shape[1] / tokens.shape[1]
        trace, teacher_trace = Trace(), Trace()
        with torch.no_grad():
            theirs.append(teacher.extend_states(chunk, state, teacher_trace)[compared])
        base = Base(base_rows(state, config.groups), objective.weight) if objective.weight < 1 else None
        ours.append(student.run_chunk(chunk, rows, base, trace)[compared])
        if objective.alignment > 0:
            alignments.append(share * alignment(trace.attended, teacher_trace.attended))
        gates.append(share * _moments(trace.gates))
    loops = zip(_whole(ours), _whole(theirs), strict=True)
    by_loop = torch.stack([divergence(student, teacher, *states) for states in loops])
    apart = torch.stack(alignments).sum() if alignments else by_loop.new_zeros(())
    loss = by_loop.mean() + objective.alignment * apart
    moments = torch.stack(gates).sum(0).view(config.loops - 1, config.layers, 2)
    return Distilled(loss, by_loop.detach(), apart.detach(), moments)


def divergence(student: Melt, teacher: LoopLM, ours: Tensor, theirs: Tensor) -> Tensor:
    """`KL(teacher || student)` of the predictions from one loop's normed states, each `[B, T, D]`: mean over tokens."""
    return head_losses.distillation(ours.flatten(0, 1), student.head.weight, theirs.flatten(0, 1), teacher.head.weight)


def _whole(chunks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """States by chunk and loop, `[B, t, D]`, as sequences by loop, `[B, T, D]`."""
    return [torch.cat(loop, dim=1) for loop in zip(*chunks, strict=True)]


def _moments(gates: Sequence[Tensor]) -> Tensor:
    """Mean and mean square of each gate, `[len(gates), 2]`."""
    wide = [gate.detach().float() for gate in gates]
    moments = [torch.stack([gate.mean(), gate.square().mean()]) for gate in wide]
    return torch.stack(moments) if moments else torch.zeros(0, 2)


def training_flops(student: Melt, teacher: LoopLM, context: int, every_loop: bool) -> float:
    """FLOPs per token of `distill` and its backward pass, as executed; works on the meta device."""
    span, loops = student.training_span(context), student.config.loops if every_loop else 1
    ours, theirs = student.cost(context).training_flops, teacher.cost_at(span, span, rows=0, exits=False).forward_flops
    inner = [flops for part, flops in (*ours.items(), *theirs.items()) if part not in ("head", "exit gate")]
    return sum(inner) + loops * (3 + 1) * theirs["head"]


@torch.no_grad()
def gate_histograms(model: Melt, tokens: Tensor, bins: int) -> Tensor:
    """Share of the gate values of `tokens [B, T]` in `bins` equal parts of [0, 1], `[R - 1, N, bins]`."""
    config = model.config
    counts = torch.zeros((config.loops - 1) * config.layers, bins, dtype=torch.float64)
    rows = [Chunks()] * config.layers
    for chunk in model.chunks(tokens):
        trace = Trace()
        model.run_chunk(chunk, rows, trace=trace)
        for index, gate in enumerate(trace.gates):
            counts[index] += torch.histc(gate.float(), bins, 0, 1).cpu()
    return (counts / counts.sum(-1, keepdim=True)).unflatten(0, (config.loops - 1, config.layers))
