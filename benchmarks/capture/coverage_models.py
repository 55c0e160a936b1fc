"""The models that `capture_coverage.py` captures, by package: each with example inputs on the meta device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from coverage_page import REAL_LENGTH
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Case = tuple[nn.Module, dict[str, Any]]  # a module and the keyword arguments of its call


def mean_of_all(output: Any) -> Tensor:
    """A loss for models that return none: every output that is not whole numbers counts."""
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


@dataclass(frozen=True)
class Model:
    """One model: how to build it, and what else it takes for training."""

    package: str
    name: str
    build: Callable[[], Case]  # called with the meta device on
    labels: Callable[[], dict[str, Any]] | None = None  # more inputs for training
    by_hand: Callable[[bool], float] | None = None  # FLOP, of training or not

    @property
    def loss(self) -> Callable[..., Tensor] | None:
        return None if self.labels and self.package != "torchvision" else mean_of_all


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# --- timm ---------------------------------------------------------------------------------------

TIMM = [
    "resnet50",
    "resnext50_32x4d",
    "seresnet50",
    "resnest50d",
    "res2net50_26w_4s",
    "regnety_016",
    "densenet121",
    "dpn68b",
    "vgg16_bn",
    "inception_v3",
    "inception_v4",
    "xception41",
    "nasnetalarge",
    "mobilenetv2_100",
    "mobilenetv3_large_100",
    "mobilenetv4_conv_small",
    "efficientnet_b0",
    "tf_efficientnetv2_s",
    "ghostnet_100",
    "hrnet_w18",
    "dla34",
    "cspdarknet53",
    "repvgg_a2",
    "convnext_tiny",
    "convnextv2_tiny",
    "vit_small_patch16_224",
    "deit3_small_patch16_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "maxvit_tiny_rw_224",
    "mixer_s16_224",
    "poolformer_s12",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "levit_128s",
    "pvt_v2_b0",
    "mobilevit_s",
    "volo_d1_224",
]


def timm(name: str) -> Model:
    def build() -> Case:
        module = importlib.import_module("timm").create_model(name, pretrained=False)
        return module, {"x": torch.zeros(2, *module.default_cfg["input_size"])}

    return Model("timm", name, build)


# --- torchvision --------------------------------------------------------------------------------


COMPILED: list[Any] = []  # torchvision's ops that are declared here: they live as long as this list
DECLARED = ("nms", "qnms", "roi_align")


def declare_torchvision_ops() -> None:
    """Name torchvision's compiled ops where its library does not load, so that it imports.

    A build for CUDA does not load beside PyTorch for CPUs. Capture runs no op: it needs the shapes
    only, which the Python part of torchvision registers. Without the names, its import fails.
    `COMPILED` is empty where the library loads. Rows of torchvision say which of the two it was.
    """
    spec = importlib.util.find_spec("torchvision")
    if COMPILED or spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(next(Path(spec.origin).parent.glob("_C*.so")))
        return
    except OSError:
        pass
    library = torch.library.Library("torchvision", "DEF")
    COMPILED.append(library)
    for name in DECLARED[:2]:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    pooled = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
    library.define(
        f"{DECLARED[2]}(Tensor input, Tensor rois, {pooled}, int sampling_ratio, bool aligned) -> Tensor"
    )


def vision(name: str, size: int = 224, argument: str = "x", path: str = "models") -> Model:
    def build() -> Case:
        family = importlib.import_module(f"torchvision.{path}")
        plain = {"weights_backbone": None} if path != "models" or name == "googlenet" else {}
        if name == "googlenet":
            plain = {"init_weights": False, "aux_logits": False}
        if path in ("models.optical_flow", "models.video"):
            plain = {}
        module = getattr(family, name)(weights=None, **plain)
        if path == "models.detection":
            return module, {"images": [torch.zeros(3, size, size)] * 2}
        if path == "models.optical_flow":
            return module, {
                "image1": torch.zeros(1, 3, 128, 128),
                "image2": torch.zeros(1, 3, 128, 128),
            }
        shape = (1, 3, 8, 64, 64) if path == "models.video" else (2, 3, size, size)
        return module, {argument: torch.zeros(shape)}

    def labels() -> dict[str, Any]:
        box = {"boxes": torch.zeros(1, 4), "labels": tokens(1)}
        return {"targets": [box, box]}

    detects = path == "models.detection"
    return Model("torchvision", name, build, labels if detects else None)


TORCHVISION = [
    vision("resnet18"),
    vision("googlenet"),
    vision("squeezenet1_1"),
    vision("shufflenet_v2_x1_0"),
    vision("vit_b_16"),
    vision("swin_t"),
    vision("deeplabv3_resnet50", 128, "x", "models.segmentation"),
    vision("raft_small", 128, "", "models.optical_flow"),
    vision("r3d_18", 64, "x", "models.video"),
    vision("fasterrcnn_mobilenet_v3_large_fpn", 128, "", "models.detection"),
    vision("retinanet_resnet50_fpn", 128, "", "models.detection"),
    vision("ssdlite320_mobilenet_v3_large", 320, "", "models.detection"),
]

# --- transformers -------------------------------------------------------------------------------

# Settings of a small model; a config takes those that it has.
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "embedding_size": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "d_ff": 128,
    "d_inner": 128,
    "hidden_dim": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
# Settings that a family needs besides, or in place of, the small ones.
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "intermediate_size": 128},
    "gptj": {"rotary_dim": 8},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 64,
        },
        "max_seq_len": 128,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "gemma2": {"query_pre_attn_scalar": 16},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 32, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 16},
    "jamba": {"mamba_d_state": 8, "num_hidden_layers": 8, "use_mamba_kernels": False},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "modernbert": {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "vit": {"image_size": 32, "patch_size": 8},
    "clip": {"text_config": dict(SMALL), "vision_config": dict(VISION), "projection_dim": 32},
    "siglip": {"text_config": dict(SMALL), "vision_config": dict(VISION)},
    "llava": {
        "text_config": {"model_type": "llama", **SMALL, "head_dim": 16},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_index": 5,
        "image_token_id": 5,
    },
    "whisper": {"max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 16},
    "wav2vec2": {
        "conv_dim": [32, 32],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
    "segformer": {
        "hidden_sizes": [16, 32, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 2],
        "decoder_hidden_size": 32,
    },
}
CAUSAL = [
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "phi3",
    "falcon",
    "mpt",
    "olmoe",
    "cohere",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "dbrx",
    "mamba",
    "mamba2",
    "recurrent_gemma",
    "rwkv",
    "jamba",
]
MASKED = [
    "bert",
    "roberta",
    "albert",
    "distilbert",
    "electra",
    "deberta-v2",
    "mobilebert",
    "xlnet",
    "modernbert",
    "fnet",
]
ENCODER_DECODER = ["t5", "bart", "marian"]
OTHERS = {  # kind: class
    "vit": "ViTForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "segformer": "SegformerForSemanticSegmentation",
    "clip": "CLIPModel",
    "llava": "LlavaForConditionalGeneration",
    "wav2vec2": "Wav2Vec2ForCTC",
    "whisper": "WhisperForConditionalGeneration",
}
LENGTH = 32


def small_config(kind: str) -> Any:
    """A config of the kind with a few small layers."""
    library = importlib.import_module("transformers")
    special = SPECIAL.get(kind, {})
    plain = library.AutoConfig.for_model(kind)
    other_names = getattr(plain, "attribute_map", {})
    known = (set(plain.to_dict()) | set(other_names)) - {
        name for name, theirs in other_names.items() if theirs in special
    }
    small = {key: value for key, value in SMALL.items() if key in known}
    return library.AutoConfig.for_model(kind, **{**small, **special})


def text(kind: str, family: str) -> Model:
    def build() -> Case:
        library = importlib.import_module("transformers")
        module = getattr(library, family).from_config(small_config(kind))
        inputs = {"input_ids": tokens(2, LENGTH)}
        if "Seq2Seq" in family:
            inputs["decoder_input_ids"] = tokens(2, LENGTH)
        return module, inputs

    return Model("transformers", kind, build, lambda: {"labels": tokens(2, LENGTH)})


def other(kind: str, class_name: str) -> Model:
    def build() -> Case:
        library = importlib.import_module("transformers")
        config = small_config(kind)
        module = getattr(library, class_name)._from_config(config)
        pixels = torch.zeros(2, 3, 32, 32)
        ids = tokens(2, LENGTH)
        inputs: dict[str, Any] = {
            "llava": {"input_ids": ids, "pixel_values": pixels},
            "clip": {"input_ids": ids, "pixel_values": pixels},
            "wav2vec2": {"input_values": torch.zeros(2, 1600)},
            "whisper": {
                "input_features": torch.zeros(2, 16, 64),
                "decoder_input_ids": tokens(2, 8),
            },
        }.get(kind, {"pixel_values": pixels})
        return module, inputs

    return Model("transformers", kind, build)


# --- diffusers ----------------------------------------------------------------------------------


def diffuser(name: str, settings: dict[str, Any], inputs: Callable[[], dict[str, Any]]) -> Model:
    def build() -> Case:
        return getattr(importlib.import_module("diffusers"), name)(**settings), inputs()

    return Model("diffusers", name, build)


BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
IMAGE = {"sample_size": 16, "in_channels": 4, "out_channels": 4}
PATCHES = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "patch_size": 2}


def latent(channels: int = 4) -> Tensor:
    return torch.zeros(1, channels, 16, 16)


DIFFUSERS = [
    diffuser(
        "UNet2DModel",
        {
            **IMAGE,
            **BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": latent(), "timestep": tokens(1)},
    ),
    diffuser(
        "UNet2DConditionModel",
        {
            **IMAGE,
            **BLOCKS,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        lambda: {
            "sample": latent(),
            "timestep": tokens(1),
            "encoder_hidden_states": torch.zeros(1, 8, 32),
        },
    ),
    diffuser(
        "AutoencoderKL",
        {
            **BLOCKS,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "sample_size": 32,
        },
        lambda: {"sample": torch.zeros(1, 3, 32, 32)},
    ),
    diffuser(
        "VQModel",
        {
            **BLOCKS,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: {"sample": torch.zeros(1, 3, 32, 32)},
    ),
    diffuser(
        "DiTTransformer2DModel",
        {**PATCHES, "sample_size": 16, "in_channels": 4, "norm_num_groups": 8},
        lambda: {"hidden_states": latent(), "timestep": tokens(1), "class_labels": tokens(1)},
    ),
    diffuser(
        "PixArtTransformer2DModel",
        {
            **PATCHES,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 8,
            "caption_channels": 32,
            "cross_attention_dim": 32,
        },
        lambda: {
            "hidden_states": latent(),
            "timestep": tokens(1),
            "encoder_hidden_states": torch.zeros(1, 8, 32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    diffuser(
        "SD3Transformer2DModel",
        {
            **PATCHES,
            "sample_size": 16,
            "in_channels": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
        lambda: {
            "hidden_states": latent(),
            "timestep": tokens(1),
            "encoder_hidden_states": torch.zeros(1, 8, 32),
            "pooled_projections": torch.zeros(1, 16),
        },
    ),
    diffuser(
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": torch.zeros(1, 64, 4),
            "encoder_hidden_states": torch.zeros(1, 8, 32),
            "pooled_projections": torch.zeros(1, 32),
            "timestep": torch.zeros(1),
            "img_ids": torch.zeros(64, 3),
            "txt_ids": torch.zeros(8, 3),
        },
    ),
]

# --- real sizes of mixtures of experts ----------------------------------------------------------

REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral-8x7B": (
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
}


def mixture(name: str) -> Model:
    kind, settings = REAL[name]

    def build() -> Case:
        library = importlib.import_module("transformers")
        config = library.AutoConfig.for_model(kind, **settings, use_cache=False)
        module = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return module, {"input_ids": tokens(1, REAL_LENGTH)}

    def by_hand(train: bool) -> float:
        """Two FLOP for each weight that a token meets, and the pairs of attention."""
        size, heads = settings["hidden_size"], settings["num_attention_heads"]
        head = settings.get("head_dim", size // heads)
        inside = settings.get("moe_intermediate_size", settings["intermediate_size"])
        experts = settings.get("num_experts", settings.get("num_local_experts"))
        projections = 2 * size * head * (heads + settings["num_key_value_heads"])
        mixed = 3 * size * inside * settings["num_experts_per_tok"] + size * experts
        met = settings["num_hidden_layers"] * (projections + mixed) + size * settings["vocab_size"]
        pairs = settings["num_hidden_layers"] * heads * REAL_LENGTH**2
        # Training: two more products for each weight; in attention 5 more, as scores are made again.
        weights, attention = (3, 7) if train else (1, 2)
        return float(weights * 2 * REAL_LENGTH * met + attention * 2 * pairs * head)

    return Model("real sizes", name, build, lambda: {"labels": tokens(1, REAL_LENGTH)}, by_hand)


MODELS = [
    *map(timm, TIMM),
    *TORCHVISION,
    *(text(kind, "AutoModelForCausalLM") for kind in CAUSAL),
    *(text(kind, "AutoModelForMaskedLM") for kind in MASKED if kind != "xlnet"),
    text("xlnet", "AutoModelForCausalLM"),
    *(text(kind, "AutoModelForSeq2SeqLM") for kind in ENCODER_DECODER),
    *(other(kind, name) for kind, name in OTHERS.items()),
    *DIFFUSERS,
    *map(mixture, REAL),
]
