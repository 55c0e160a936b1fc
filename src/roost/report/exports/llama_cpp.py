"""Options of llama.cpp for a Llama-shaped model: `-ngl` and the tensor overrides `-ot`.

llama.cpp runs a layer where its weights lie. For each tensor it takes the first regex of `-ot` that
matches the name. On a machine with one GPU, all tensors are on it except those listed; with several
GPUs, every tensor is listed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.report.exports._export import Export, refuse_unrolled

if TYPE_CHECKING:
    from torch import nn

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# llama.cpp has all experts of a layer in one tensor; newer transformers in one or two.
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "gate_up_proj": "ffn_gate_exps ffn_up_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:\d+\.)?(\w+)")


@dataclass(frozen=True)
class LlamaCpp(Export):
    """The options, and the buffers of the tensors."""

    rules: tuple[tuple[str, str], ...]  # (regex, buffer), in order
    num_gpu_layers: int  # of -ngl
    tensors: Mapping[str, str]  # tensor of llama.cpp -> the buffer it should be in
    agreement: float  # share of the bytes on the placement's device

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> LlamaCpp:
        refuse_unrolled(problem)
        return llama_cpp(problem, placement)

    @property
    def line(self) -> str:
        """The options for the command line of `llama-cli` and `llama-server`."""
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

    def __str__(self) -> str:
        return (
            f"{len(self.rules)} rules for {len(self.tensors)} tensors; {self.agreement:.1%} of "
            "the bytes are where the placement has them"
        )


def llama_cpp(problem: Problem, placement: Placement) -> LlamaCpp:
    """The options for the weights of a placement; raises InputError if the model is no Llama."""
    placement = problem.check(placement)
    sizes = _sizes(problem, placement)
    chosen = {tensor: max(size, key=lambda b: (size[b], b)) for tensor, size in sizes.items()}
    kept = sum(size[chosen[tensor]] for tensor, size in sizes.items())
    total = sum(size.total() for size in sizes.values())
    layers = 1 + max(int(tensor.split(".")[1]) for tensor in chosen if tensor.startswith("blk."))
    gpus = sorted({buffer for buffer in chosen.values() if buffer != "CPU"})
    agreement = kept / total if total else 1.0
    if not gpus:
        return LlamaCpp((), 0, chosen, agreement)  # the default is the CPU
    num_gpus = sum(device.kind == "cuda" for device in problem.cluster.devices)
    default = gpus[0] if num_gpus == 1 else None
    listed = {}
    for tensor, buffer in chosen.items():
        is_embedding = tensor.startswith("token_embd")  # llama.cpp reads it on the CPU
        if buffer != ("CPU" if is_embedding else default):
            listed[tensor] = buffer
    return LlamaCpp(tuple(_rules(listed, set(chosen))), layers + 1, chosen, agreement)


def _sizes(problem: Problem, placement: Placement) -> dict[str, Counter[str]]:
    """Tensor of llama.cpp -> its bytes in each buffer of the placement."""
    graph = problem.graph
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
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
            sizes[tensor][buffer] += int(graph.output_bytes[op]) // len(tensors)
    if not any(tensor.startswith("blk.") for tensor in sizes):
        raise InputError(
            f"graph {graph.name!r} has no layers of a Llama; llama.cpp overrides are for those "
            "alone"
        )
    return dict(sizes)


def gguf_names(name: str) -> tuple[str, ...]:
    """The names in llama.cpp of a weight of transformers; () if it is not a Llama's."""
    module, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):  # experts in one tensor have no suffix
        module = name
        suffix = "weight"
    if module in _WHOLE:
        return (f"{_WHOLE[module]}.{suffix}",)
    if (layer := _LAYER.fullmatch(module)) is None:
        return ()
    part = layer[2].replace("block_sparse_moe.", "mlp.")
    names = _IN_LAYER.get(part, "")
    if not names and (expert := _EXPERT.fullmatch(part)):
        names = _EXPERTS.get(expert[1], "")
    return tuple(f"blk.{layer[1]}.{name}.{suffix}" for name in names.split())


def _buffer(problem: Problem, device: int) -> str:
    name = problem.cluster.devices[device].name
    kind = problem.cluster.devices[device].kind
    cuda = re.fullmatch(r"cuda:(\d+)", name)
    if kind == "cuda" and cuda:
        return f"CUDA{cuda[1]}"
    if kind == "cpu":
        return "CPU"
    raise InputError(
        f"llama.cpp overrides are for cpu and cuda:N; device {name!r} is of kind {kind!r}"
    )


def _rules(listed: Mapping[str, str], everything: set[str]) -> Iterable[tuple[str, str]]:
    """Few regexes that put each listed tensor, and no other, into its buffer."""
    whole: defaultdict[int, set[str]] = defaultdict(set)  # layer -> all its tensors
    for number, part in filter(None, map(_in_layer, everything)):
        whole[number].add(part)
    # Buffer -> layer -> its tensors in that buffer.
    wanted: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for tensor, buffer in listed.items():
        if (place := _in_layer(tensor)) is None:
            yield f"^{re.escape(tensor)}", buffer
        else:
            wanted[buffer][place[0]].add(place[1])
    for buffer, layers in wanted.items():
        # Tensors, or no tensor for all of them -> layers.
        alike: defaultdict[frozenset[str], list[int]] = defaultdict(list)
        for number, parts in sorted(layers.items()):
            alike[frozenset() if parts == whole[number] else frozenset(parts)].append(number)
        for some, numbers in alike.items():
            inside = _factored(sorted(some)) if some else ""
            yield rf"^blk\.{whole_numbers(numbers)}\.{inside}", buffer


def _in_layer(tensor: str) -> tuple[int, str] | None:
    """The layer of a tensor, and its name in there."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
    return (int(match[1]), match[2]) if match else None


def _factored(names: list[str]) -> str:
    """A regex for these names, with their common start and end written once.

    It has no dollar sign at the end, because some shells read it. No name goes on after `.weight`.
    """
    front = _common_start(names)
    front = front[: front.rfind("_") + 1]
    back = _common_start([name[len(front) :][::-1] for name in names])[::-1]
    separator = re.search("[_.]", back)
    back = back[separator.start() :] if separator else ""
    middles = [name[len(front) : len(name) - len(back)] for name in names]
    return re.escape(front) + _choice([re.escape(middle) for middle in middles]) + re.escape(back)


def _common_start(texts: list[str]) -> str:
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _choice(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def whole_numbers(numbers: Iterable[int]) -> str:
    """A regex for exactly these numbers, such as `([4-9]|1[0-9]|2[0-3])`."""
    digits: defaultdict[str, list[int]] = defaultdict(list)  # all but the last digit -> last digits
    for number in sorted(set(numbers)):
        digits[str(number)[:-1]].append(number % 10)
    alike: defaultdict[str, list[str]] = defaultdict(list)  # regex of the last digit -> fronts
    for front, last in digits.items():
        alike[_digits(last)].append(front)
    choices = []
    for end, fronts in alike.items():
        longer = [front for front in fronts if front]
        if "" in fronts:
            choices.append(end)
        if longer:
            single = all(len(front) == 1 for front in longer)
            start = _digits([int(front) for front in longer]) if single else _choice(longer)
            choices.append(start + end)
    return _choice(choices)


def _digits(numbers: list[int]) -> str:
    """A regex for one digit of several."""
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
    """The digits `first` to `last` between the brackets of a regex."""
    if first == last:
        return str(first)
    return f"{first}{last}" if last == first + 1 else f"{first}-{last}"
