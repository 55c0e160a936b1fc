"""Options of llama.cpp for a Llama-shaped model: `-ngl` and the tensor overrides `-ot`.

llama.cpp runs a layer where its weights lie, and asks the regexes of `-ot` in order for where that
is; the first that is found in the name of a tensor counts. On a machine with one GPU all tensors
are on it but those that are listed; with several, every tensor is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.report.exports._export import Export

if TYPE_CHECKING:
    from torch import nn

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": ("attn_norm",),
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.o_proj": ("attn_output",),
    "self_attn.q_norm": ("attn_q_norm",),
    "self_attn.k_norm": ("attn_k_norm",),
    "post_attention_layernorm": ("ffn_norm",),
    "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_up",),
    "mlp.down_proj": ("ffn_down",),
    "mlp.gate": ("ffn_gate_inp",),
    "mlp.shared_expert.gate_proj": ("ffn_gate_shexp",),
    "mlp.shared_expert.up_proj": ("ffn_up_shexp",),
    "mlp.shared_expert.down_proj": ("ffn_down_shexp",),
    "mlp.shared_expert_gate": ("ffn_gate_inp_shexp",),
}
# All experts of a layer are one tensor in llama.cpp; newer transformers have them as one or two
# tensors too.
_EXPERTS = {
    "gate_proj": ("ffn_gate_exps",),
    "up_proj": ("ffn_up_exps",),
    "down_proj": ("ffn_down_exps",),
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "w1": ("ffn_gate_exps",),
    "w3": ("ffn_up_exps",),
    "w2": ("ffn_down_exps",),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:\d+\.)?(\w+)")


@dataclass(frozen=True)
class LlamaCpp(Export):
    """The options, and the tensors that they are about."""

    rules: tuple[tuple[str, str], ...]  # (regex, buffer), in order
    num_gpu_layers: int  # of -ngl
    tensors: Mapping[str, str]  # tensor of llama.cpp -> the buffer it should be in
    agreement: float  # share of the bytes that are where the placement has them

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> LlamaCpp:
        return llama_cpp(problem, placement)

    @property
    def line(self) -> str:
        """As on the command line of `llama-cli` and `llama-server`."""
        rules = ",".join(f"{regex}={buffer}" for regex, buffer in self.rules)
        return f"-ngl {self.num_gpu_layers}" + (f' -ot "{rules}"' if rules else "")

    def text(self) -> str:
        return self.line + "\n"

    def facts(self) -> dict[str, Any]:
        return {
            "line": self.line,
            "num_gpu_layers": self.num_gpu_layers,
            "rules": [list(rule) for rule in self.rules],
            "tensors": dict(self.tensors),
            "agreement": self.agreement,
        }

    def buffer_of(self, tensor: str) -> str | None:
        """Where the rules put a tensor; None where none is about it."""
        return next((buffer for regex, buffer in self.rules if re.search(regex, tensor)), None)

    def __str__(self) -> str:
        return (
            f"{len(self.rules)} rules for {len(self.tensors)} tensors; {self.agreement:.1%} of "
            "the bytes are where the placement has them"
        )


def llama_cpp(problem: Problem, placement: Placement) -> LlamaCpp:
    """The options for where the placement has the weights. Raises InputError for what is not shaped
    like Llama."""
    placement = problem.check(placement)
    sizes = _sizes(problem, placement)
    chosen = {tensor: max(there, key=lambda b: (there[b], b)) for tensor, there in sizes.items()}
    kept = sum(there[chosen[tensor]] for tensor, there in sizes.items())
    total = sum(sum(there.values()) for there in sizes.values())
    layers = 1 + max(int(tensor.split(".")[1]) for tensor in chosen if tensor.startswith("blk."))
    gpus = sorted({buffer for buffer in chosen.values() if buffer != "CPU"})
    agreement = kept / total if total else 1.0
    if not gpus:
        return LlamaCpp((), 0, chosen, agreement)  # and then everything is on the CPU
    usual = (
        gpus[0] if sum(device.kind == "cuda" for device in problem.cluster.devices) == 1 else None
    )
    listed = {
        tensor: buffer for tensor, buffer in chosen.items() if buffer != _default(tensor, usual)
    }
    return LlamaCpp(tuple(_rules(listed, set(chosen))), layers + 1, chosen, agreement)


def _default(tensor: str, usual: str | None) -> str | None:
    """Where it is with all layers on the one GPU; the embedding is read on the CPU."""
    return "CPU" if tensor.startswith("token_embd") else usual


def _sizes(problem: Problem, placement: Placement) -> dict[str, dict[str, int]]:
    """Tensor of llama.cpp -> bytes of it by where the placement has them."""
    graph, found = problem.graph, dict[str, dict[str, int]]()
    for op, name in enumerate(graph.op_names):
        if not graph.is_parameter[op] or "rotary_emb" in name or "." not in name:
            continue
        tensors = gguf_names(name)
        if not tensors:
            raise InputError(
                f"{name!r} is no weight of a Llama as transformers has them "
                "(model.layers.N.self_attn.q_proj.weight, ...); llama.cpp overrides are for those "
                "alone"
            )
        buffer = _buffer(problem, int(placement.device[op]))
        for tensor in tensors:
            there = found.setdefault(tensor, {})
            there[buffer] = there.get(buffer, 0) + int(graph.output_bytes[op]) // len(tensors)
    if not any(tensor.startswith("blk.") for tensor in found):
        raise InputError(
            f"graph {graph.name!r} has no layers of a Llama; llama.cpp overrides are for those "
            "alone"
        )
    return found


def gguf_names(name: str) -> tuple[str, ...]:
    """What llama.cpp calls a weight of transformers; () where it is none of a Llama."""
    module, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):  # experts in one tensor have no more to their name
        module, suffix = name, "weight"
    if module in _WHOLE:
        return (f"{_WHOLE[module]}.{suffix}",)
    if (layer := _LAYER.fullmatch(module)) is None:
        return ()
    part = layer[2].replace("block_sparse_moe.", "mlp.")
    found: tuple[str, ...] = _IN_LAYER.get(part, ())
    if not found and (expert := _EXPERT.fullmatch(part)):
        found = _EXPERTS.get(expert[1], ())
    return tuple(f"blk.{layer[1]}.{each}.{suffix}" for each in found)


def _buffer(problem: Problem, device: int) -> str:
    found = problem.cluster.devices[device]
    cuda = re.fullmatch(r"cuda:(\d+)", found.name)
    if found.kind == "cuda" and cuda:
        return f"CUDA{cuda[1]}"
    if found.kind == "cpu":
        return "CPU"
    raise InputError(
        f"llama.cpp overrides are for cpu and cuda:N; device {found.name!r} is of kind "
        f"{found.kind!r}"
    )


def _rules(listed: Mapping[str, str], everything: set[str]) -> Iterable[tuple[str, str]]:
    """Few regexes that put each listed tensor, and no other, into its buffer."""
    whole: dict[int, set[str]] = {}  # layer -> all its tensors
    for number, part in filter(None, map(_in_layer, everything)):
        whole.setdefault(number, set()).add(part)
    # Buffer -> layer -> those of its tensors that belong there.
    wanted: dict[str, dict[int, set[str]]] = {}
    for tensor, buffer in listed.items():
        if (place := _in_layer(tensor)) is None:
            yield f"^{re.escape(tensor)}", buffer
        else:
            wanted.setdefault(buffer, {}).setdefault(place[0], set()).add(place[1])
    for buffer, layers in wanted.items():
        alike: dict[frozenset[str], list[int]] = {}  # tensors, none for all -> layers
        for number, parts in sorted(layers.items()):
            alike.setdefault(
                frozenset() if parts == whole[number] else frozenset(parts), []
            ).append(number)
        for some, numbers in alike.items():
            inside = _factored(sorted(some)) if some else ""
            yield rf"^blk\.{whole_numbers(numbers)}\.{inside}", buffer


def _in_layer(tensor: str) -> tuple[int, str] | None:
    """The layer of a tensor, and what it is in there."""
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
    return (int(found[1]), found[2]) if found else None


def _factored(names: list[str]) -> str:
    """A regex for one of these names, what they all begin and end with written once.

    Nothing says that a name ends there: a dollar sign would be read by some shells, and none goes
    on after `.weight`.
    """
    front = _common_start(names)
    front = front[: front.rfind("_") + 1]
    back = _common_start([name[len(front) :][::-1] for name in names])[::-1]
    back = back[
        min((at for at in (back.find("_"), back.find(".")) if at >= 0), default=len(back)) :
    ]
    middles = [name[len(front) : len(name) - len(back)] for name in names]
    return re.escape(front) + _choice([re.escape(middle) for middle in middles]) + re.escape(back)


def _common_start(texts: list[str]) -> str:
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _choice(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def whole_numbers(numbers: Iterable[int]) -> str:
    """A regex for these numbers and no others: `([4-9]|1[0-9]|2[0-3])`."""
    digits: dict[str, list[int]] = {}  # all but the last digit -> last digits
    for number in sorted(set(numbers)):
        digits.setdefault(str(number)[:-1], []).append(number % 10)
    alike: dict[str, list[str]] = {}  # regex of the last digit -> what may be before it
    for front, last in digits.items():
        alike.setdefault(_digits(last), []).append(front)
    found = []
    for end, fronts in alike.items():
        named = [front for front in fronts if front]
        if "" in fronts:
            found.append(end)
        if named:
            short = all(len(front) == 1 for front in named)
            found.append(
                (_digits([int(front) for front in named]) if short else _choice(named)) + end
            )
    return _choice(found)


def _digits(numbers: list[int]) -> str:
    """One digit, or a class of several."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"[{''.join(_run(first, last) for first, last in runs)}]"


def _run(first: int, last: int) -> str:
    """Digits `first` to `last` as they stand between brackets of a regular expression."""
    if first == last:
        return str(first)
    return f"{first}{last}" if last == first + 1 else f"{first}-{last}"
