"""A tiny model of any model type of the installed Transformers, with random weights and inputs that it runs on.

One rule makes them: a config's fields are set small by their names, in all of its sub-configs; `tiny_exceptions.py` says
what has to be said of single types.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from benchmarks.model_types.tiny_exceptions import COMPOSITES, CONFIGS, INPUTS, MODELS
from hf_synthesizer.layers.finding.stock_classes import is_stock_model

ROWS, LENGTH, TARGETS = 2, 10, 7
"""The rows of a batch, its tokens, and the tokens of a decoder behind an encoder."""
FIRST_WORD, VOCABULARY = 40, 99
"""Tokens below the first word have a meaning of their own (padding, images)."""
LARGEST = 30_000_000
"""More parameters than that are not tiny, and are not built."""

HIDDEN, HEADS, LAYERS, SIDE = 64, 4, 2, 32
RULE: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?|vocabulary_size", VOCABULARY),
    (
        r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_query_heads)|num_decoder_attention_heads",
        HEADS,
    ),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|depth|num_blocks|num_transformer_layers)", LAYERS),
    (r"(num_)?(encoder|decoder|text|vision|audio|resampler|block)_(num_)?(hidden_)?(layers|depth)", LAYERS),
    (r"(.*_)?(encoder|decoder)_(num_)?(hidden_)?layers|num_(en|de)coder_blocks", LAYERS),
    (
        r"(.*_)?(head_dim|d_kv|dim_head|attention_head_size|attention_key_size)|v_head_dim|qk_nope_head_dim",
        HIDDEN // HEADS,
    ),
    (r"qk_rope_head_dim|rotary_dim", HIDDEN // HEADS // 2),
    (r"q_lora_rank|kv_lora_rank|.*lora_rank", 16),
    (
        r"(.*_)?(intermediate_size|intermediate_dim|ffn_dim|d_ff|mlp_dim|feed_forward_hidden_size|ffn_hidden_size|d_inner)",
        2 * HIDDEN,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embedding_size|projection_dim|embed_dim|proj_size|embedding_dim)",
        HIDDEN,
    ),
    (
        r"query_pre_attn_scalar|emb_dim|projector_dim|out_dim|output_dim|output_channels|model_dim|.*projection_size|dim",
        HIDDEN,
    ),
    (r"hidden_size_per_layer_input|.*_hidden_size_.*", HIDDEN // 2),
    (r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_seq_length|context_length)", 64),
    (
        r"max_(source|target)_positions|max_length|max_2d_position_embeddings|max_speech_positions|max_text_positions",
        64,
    ),
    (r"(.*_)?image_size|pretrain_image_size", SIDE),
    (r"patch_size|encoder_stride", 8),
    (r"sliding_window|attention_window_size|local_attention_window|attn_window_size", 4),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"num_mel_bins|feature_size|input_feat_per_channel", 16),
    (r"num_conv_pos_embedding_groups", 4),
    (r"num_conv_pos_embeddings", 16),
    (r"num_queries|num_query_tokens", 6),
    (r"codebook_size|num_embeddings|num_codevectors_per_group", 16),
    (r"global_window_size|window_size", 4),
    (r"block_size|axial_pos_embds_dim", 8),
    (r"conv_hidden_size|upsample_initial_channel|base_channels|stem_channels", HIDDEN),
    (r"mamba_(n_heads|d_state)|ssm_state_size|state_size|mamba_num_heads", 8),
    (r"mamba_chunk_size|chunk_size", 4),
    (r"linear_num_(key|value)_heads|linear_(key|value)_head_dim", 4),
    (r"index_topk|index_n_heads", 4),
)
"""Patterns of field names, and what a number under such a name becomes; the first that fits counts."""
HEAD_NAMES = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "encoder_attention_heads")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
TOKEN = re.compile(r"_token_(id|index)$|_token_ids$|^image_seq_length$")

UNNAMED = {"vocab_size": VOCABULARY, "head_dim": HIDDEN // HEADS, "num_key_value_heads": HEADS // 2}
"""What a config may leave open, and a model then does not run without."""

Inputs = dict[str, Any]


class NotBuilt(Exception):
    """Why there is no tiny model of a type, or (`model`) no inputs that it runs on."""

    model: PreTrainedModel | None = None


@dataclasses.dataclass
class Tiny:
    """A stock model in eval mode, and the inputs that it runs on."""

    model: PreTrainedModel
    inputs: Inputs


def build(model_type: str) -> Tiny:
    """The tiny model of a type, the same at each call.

    Raises:
        NotBuilt: with the reason.
    """
    config = tiny_config(model_type)
    try:
        return build_from(config, model_class(model_type, config))
    except NotBuilt:
        raise
    except Exception as error:  # noqa: BLE001 - a row says why, whatever it was
        raise NotBuilt(f"the model: {type(error).__name__}: {error}") from error


def build_from(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> Tiny:
    """The tiny model of a class, and the first inputs that it runs on."""
    size = sum(parameter.numel() for parameter in on_meta(config, cls).parameters())
    if size > LARGEST:
        raise NotBuilt(f"{cls.__name__} has {size} parameters under the rule for tiny models")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh biases are zero, and fresh weights so small that attention hardly looks at anything.
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if parameter.dim() > 1 else 0.05)
    reasons = []
    for inputs in batches(model):
        try:
            tensors = run(model, inputs)
        except Exception as error:  # noqa: BLE001 - any error means that these are not its inputs
            reasons.append(f"{', '.join(inputs)}: {type(error).__name__}: {error}")
            continue
        if tensors and all(bool(tensor.isfinite().all()) for tensor in tensors):
            return Tiny(model, inputs)
        reasons.append(f"{', '.join(inputs)}: no finite output")
    failure = NotBuilt(f"{cls.__name__} ran on no inputs: {'; '.join(dict.fromkeys(reasons))}")
    failure.model = model
    raise failure


def on_meta(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedModel:
    with torch.device("meta"):
        return cls(config)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The small config of a type.

    Raises:
        NotBuilt: where even the config cannot be made.
    """
    try:
        cls = CONFIG_MAPPING[model_type]
        if model_type in COMPOSITES:
            return cls.from_encoder_decoder_configs(*map(tiny_config, COMPOSITES[model_type]))
        return _small(cls, CONFIGS.get(model_type, {}), numbers=itertools.count(10))
    except Exception as error:  # noqa: BLE001 - a row says why, whatever it was
        raise NotBuilt(f"its config: {type(error).__name__}: {error}") from error


def _small(cls: type[PreTrainedConfig], exceptions: dict[str, Any], numbers: Iterator[int]) -> PreTrainedConfig:
    known = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"decoder_start_token_id"}
    fields = [field.name for field in dataclasses.fields(cls) if field.name not in known]
    default = _default(cls)
    values: dict[str, Any] = {}
    for name in fields:
        value = _plain(default, name)
        if name in cls.sub_configs:
            sub = type(value) if isinstance(value, PreTrainedConfig) else cls.sub_configs[name]
            own = exceptions.get(name, {})
            if isinstance(own, PreTrainedConfig) or own is None:
                values[name] = own
            elif isinstance(own, dict) and "model_type" in own:
                rest = {key: item for key, item in own.items() if key != "model_type"}
                chosen = own["model_type"]
                values[name] = _small(CONFIG_MAPPING[chosen], {**CONFIGS.get(chosen, {}), **rest}, numbers)
            elif value is not None and sub is not PreTrainedConfig and issubclass(sub, PreTrainedConfig):
                values[name] = _small(sub, {**CONFIGS.get(sub.model_type, {}), **own}, numbers)
            continue
        small = _small_value(name, value, default, numbers)
        if small is not None:
            values[name] = small
    if isinstance(_plain(default, "num_heads"), (list, tuple)):  # a pyramid of stages: as wide as its heads ask
        values.update(
            {width: 8 * default.num_heads[0] for width in ("embed_dim",) if isinstance(values.get(width), int)}
        )
    depth = next((values[name] for name in DEPTHS if isinstance(values.get(name), int)), None)
    if isinstance(_plain(default, "layer_types"), (list, tuple)) and "layer_types" in fields and depth:
        kinds = list(dict.fromkeys(default.layer_types))
        values["layer_types"] = (kinds * depth)[: max(depth, len(kinds))]
        values[next(name for name in DEPTHS if name in values)] = len(values["layer_types"])
    values.update({name: value for name, value in exceptions.items() if name not in cls.sub_configs})
    return cls(**values)


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    config = cls()
    config.__dict__["allow_global_per_layer_attribute_access"] = True
    return config


def _plain(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - a few configs refuse to name what differs from layer to layer
        return None


def _small_value(name: str, value: Any, config: PreTrainedConfig, numbers: Iterator[int]) -> Any:
    """What a field becomes; None for what stays as it is."""
    if TOKEN.search(name):
        if isinstance(value, int) and not isinstance(value, bool) and value >= 10:
            return next(numbers)
        if isinstance(value, (list, tuple)) and any(item >= 10 for item in value):
            return [next(numbers) for _ in value]
        return None
    if value is None and name in UNNAMED:
        return UNNAMED[name]
    if isinstance(value, dict) and name == "rope_parameters":
        return _sections_that_fit(value, config)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if re.fullmatch(r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads?|num_global_key_value_heads)", name):
        heads = next((found for head in HEAD_NAMES if isinstance(found := _plain(config, head), int)), value)
        return HEADS if value >= heads else min(value, HEADS // 2)
    for pattern, small in RULE:
        if re.fullmatch(pattern, name):
            return min(value, small) if re.search("window|patch", name) else small
    return None


def _sections_that_fit(rotation: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any] | None:
    """The parameters of a rotation whose sections, for time, height and width, fill a small head; None without any."""
    if "mrope_section" not in rotation:
        return None
    pairs = (
        int(HIDDEN // HEADS * rotation.get("partial_rotary_factor", _plain(config, "partial_rotary_factor") or 1)) // 2
    )
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {**rotation, "mrope_section": sections[: len(rotation["mrope_section"])]}


def model_class(model_type: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that stands for a type: its bare model, else its first head.

    Raises:
        NotBuilt: for a type that is a part of others, without a model class that Transformers exports.
    """
    if model_type in MODELS:
        return getattr(transformers, MODELS[model_type])
    for auto_class in _auto_classes():
        mapping = auto_class._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found[0] if isinstance(found, (tuple, list)) else found
            if is_stock_model(found):
                return found
    module = _modeling(model_type, config)
    own = [cls for cls in vars(module).values() if inspect.isclass(cls) and _stands_for(cls, config)]
    if not own:
        raise NotBuilt("a part of other types: Transformers exports no model class of it")
    return min(own, key=lambda cls: (not cls.__name__.endswith("Model"), len(cls.__name__), cls.__name__))


def _stands_for(cls: type, config: PreTrainedConfig) -> bool:
    if not issubclass(cls, PreTrainedModel) or cls.config_class is not type(config) or not is_stock_model(cls):
        return False
    return not cls.__name__.endswith("PreTrainedModel")


def _modeling(model_type: str, config: PreTrainedConfig) -> Any:
    folder = type(config).__module__.rpartition(".")[0]
    name = folder.rpartition(".")[2] or model_type_to_module_name(model_type)
    try:
        return importlib.import_module(f"{folder}.modeling_{name}")
    except ImportError as error:
        raise NotBuilt(f"its modeling file: {error}") from error


def _auto_classes() -> list[Any]:
    """Transformers' Auto classes: bare models first, those that generate next."""
    first = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")
    found = [
        cls
        for cls in vars(modeling_auto).values()
        if isinstance(cls, type) and getattr(cls, "_model_mapping", None) is not None
    ]
    return sorted(found, key=lambda cls: (first.index(cls.__name__) if cls.__name__ in first else 9, cls.__name__))


def batches(model: PreTrainedModel) -> Iterator[Inputs]:
    """Inputs that a model may run on, the likeliest first."""
    exceptions = INPUTS.get(model.config.model_type)
    if exceptions is not None:
        yield {name: make() for name, make in exceptions.items()}
        return
    parameters = inspect.signature(model.forward).parameters
    takes = set(parameters)
    beside = {name: make() for name, make in BESIDE.items() if name in takes}
    size = _size_of_images(model.config)
    senses = [name for name in takes & SENSES.keys()]
    senses.sort(key=lambda name: (name != model.main_input_name, name))
    options = {name: [make(*size) for make in SENSES[name]] for name in senses}
    chosen = [(name,) for name in senses] + [
        pair for count in (2, 3) for pair in itertools.combinations(senses, count)
    ]
    chosen.sort(key=lambda names: (model.main_input_name not in names, len(names)))
    for names in chosen:
        for tensors in itertools.product(*(options[name] for name in names)):
            with_mask = {"attention_mask": _ragged()} if "input_ids" in names and "attention_mask" in takes else {}
            yield {**dict(zip(names, tensors, strict=True)), **with_mask, **beside}


def _words(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(FIRST_WORD, VOCABULARY - 2, (rows, length), generator=generator)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _ragged() -> torch.Tensor:
    """A mask of which the last row ends with padding."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[-1, -2:] = 0
    return mask


BESIDE: dict[str, Any] = {
    "decoder_input_ids": lambda: _words(ROWS, TARGETS),
    "bbox": lambda: torch.tensor([[1, 2, 3, 4]]).expand(ROWS, LENGTH, 4).clone(),
}
"""What a model takes beside its main input."""
SENSES: dict[str, tuple[Any, ...]] = {
    "input_ids": (lambda *size: _words(ROWS, LENGTH),),
    "pixel_values": (
        lambda channels, *size: _noise(ROWS, channels, *size),
        lambda channels, *size: _noise(ROWS, 2, channels, *size),
    ),
    "pixel_values_videos": (lambda channels, *size: _noise(ROWS, 4, channels, *size),),
    "input_values": (
        lambda *size: _noise(ROWS, 4000),
        lambda *size: _noise(ROWS, 1, 4000),
        lambda *size: _noise(ROWS, 64, 16),
    ),
    "input_features": (
        lambda *size: _noise(ROWS, 16, 64),
        lambda *size: _noise(ROWS, 64, 16),
        lambda *size: _noise(ROWS, 16, 128),
    ),
}
"""How a batch of each kind may look; the first that runs is taken."""


def _size_of_images(config: PreTrainedConfig) -> tuple[int, int, int]:
    """The channels, the height and the width of the images that a config speaks of."""
    for holder in (config, *(_plain(config, name) for name in ("vision_config", "encoder", "backbone_config"))):
        size = _plain(holder, "image_size") if holder is not None else None
        if size is not None:
            sides = list(size.values() if isinstance(size, dict) else [size] if isinstance(size, int) else size)
            return int(_plain(holder, "num_channels") or 3), int(sides[0]), int(sides[-1])
    return 3, 4 * SIDE, 4 * SIDE


def run(model: PreTrainedModel, inputs: Inputs, **arguments: Any) -> list[torch.Tensor]:
    """What `tensors_of` a model's output finds; a few models draw masks or noise, always the same ones here."""
    torch.manual_seed(0)
    return tensors_of(model(**inputs, **arguments))


SKIPPED = ("loss", "past_key_values", "attentions", "hidden_states", "cross_attentions", "cache_params")


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of numbers in an output, in order, its cache and recorded states left out."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [
            tensor
            for name, value in output.items()
            if not any(name.endswith(end) for end in SKIPPED)
            for tensor in tensors_of(value)
        ]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []
