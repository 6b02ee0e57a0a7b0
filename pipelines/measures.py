"""What a run of a sweep measures, by the names of the ledger: a misspelt one is refused before anything runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from models.configuration import ConfigError, nearest, require
from pipelines.cells import Cell

CONTEXT, CONTROL = r"(?P<context>\d+)", r"(?P<controls>/(zero|reset|shuffle))?"
TRAINING = ("parameters", "tokens", "tokens_per_second", "training_flops_per_token", "train_loss", "validation_loss")
MEASURES = {  # as a person reads it -> as it is recognised; a named group is what the evaluation has to be told
    **{name: name for name in TRAINING},
    "ppl/window_mean/<context>": f"ppl/window_mean/{CONTEXT}{CONTROL}",
    "ppl/fixed_targets/<context>": f"ppl/fixed_targets/{CONTEXT}{CONTROL}",
    "bits_per_byte/<context>": f"bits_per_byte/{CONTEXT}",
    "state_bytes/<context>": f"state_bytes/{CONTEXT}",
    "streaming/perplexity": "streaming/perplexity",
    "streaming/tokens": "streaming/tokens",
    "peak_memory_bytes/<context>": f"(?P<timing>peak_memory_bytes)/{CONTEXT}",
    "prefill_tokens_per_second/<context>": f"(?P<timing>prefill_tokens_per_second)/{CONTEXT}",
    "decode_tokens_per_second": "(?P<timing>decode_tokens_per_second)",
    "recall/chance": "(?P<recall>recall)/chance",
    "recall/mqar/<context>": f"(?P<recall>recall)(/questions)?/mqar/{CONTEXT}",
    "recall/needle/<context>": rf"(?P<recall>recall)/(needle/{CONTEXT}/[01]\.\d\d|questions/needle/\d+)",
    "recall/facts/<chunks>": r"(?P<recall>recall)(/questions)?/facts/\d+",
}
CONTEXTS = "evaluate.contexts"
SWITCHES = ("controls", "recall", "timing")  # fields of `evaluate`


def check_measure(stated: str, name: str, where: str, cells: Sequence[Cell]) -> None:
    """Refuse a measure that no cell's evaluation gives.

    Args:
        stated: as the sweep file has it.
        name: as the ledger has it.
        where: the field that states it.
    Raises:
        ConfigError: for an unknown measure, a context that is not evaluated, or a part of the evaluation that is off.
    """
    found = next((match for form in MEASURES.values() if (match := re.fullmatch(form, name))), None)
    if found is None:
        known = re.sub(r"<\w+>", "1x", "\n".join(MEASURES)).split("\n")
        raise ConfigError(f"{where}: unknown measure {stated!r}{nearest(stated, known)}; known: {', '.join(MEASURES)}")
    told = found.groupdict()
    context = told.get("context")
    for contexts in [cell.overrides[CONTEXTS] for cell in cells if CONTEXTS in cell.overrides]:
        require(
            context is None or int(context) in contexts,
            f"{where}: measure {stated!r} needs a context of {context} tokens; evaluate.contexts={contexts}",
        )
    for switch in SWITCHES:
        on = [cell.overrides.get(f"evaluate.{switch}", True) for cell in cells]
        require(told.get(switch) is None or any(on), f"{where}: measure {stated!r} needs evaluate.{switch}=true")
