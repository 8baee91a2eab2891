"""LoRA on patched models: which modules it adapts, and which are trained whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from .errors import CheckpointMismatchError, NotPatchedError
from .layers.finding.attention_layers import find_attention_layers
from .layers.finding.projections import find_projection_names
from .layers.mixin import SynthesizerMixin
from .layers.patched import is_patched, stock_class
from .layers.sentence_transformers import model_in

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
}


def lora_config_for(model: PreTrainedModel, **lora_kwargs: Any) -> LoraConfig:
    """A `LoraConfig` that fits a patched model.

    LoRA's own defaults look for query and value projections, and would leave the synthesizers at their random start. Here LoRA
    adapts pretrained projections: the values of synthesized layers, queries and keys of `dot_product` and of heads that keep
    the stock attention, and queries and values of stock self-attention layers. The synthesizers are new: they are trained
    whole and saved with the adapter.

    Args:
        model: a patched model, or a SentenceTransformer around one, whose `add_adapter` takes what is returned.
        **lora_kwargs: for `LoraConfig`. `target_modules` takes the place of ours; `modules_to_save` adds to ours;
            `task_type` is guessed from the model's head unless given.

    The guards of the synthesized layers are saved with the adapter too. A stock base has a query projection of another shape
    under their name, so PEFT refuses it. A base that is patched in another way refuses their fingerprint.

    Raises:
        NotPatchedError: for a model without synthesized layers.
    """
    from peft import LoraConfig

    model = model_in(model)
    _require_patched(model, "for a stock model use peft.LoraConfig itself")
    targets, whole, guards = [], [], []
    for attention_layer in find_attention_layers(model).layers:
        layer, prefix = attention_layer.module, attention_layer.name
        if isinstance(layer, SynthesizerMixin):
            guards.append(f"{prefix}.{layer.guard_name}")
            targets += [f"{prefix}.{name}" for name in layer.projections_to_adapt()]
            whole += [f"{prefix}.{name}" for name, part in layer.synthesizers() if not part.is_stock]
        elif names := find_projection_names(layer):
            adapted = [names.fused] if names.fused else [names.query, names.value]
            targets += [f"{prefix}.{name}" for name in adapted]
    name = stock_class(model).__name__
    task = next((task for head, task in _TASKS.items() if name.endswith(head)), None)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        task = None  # PEFT's classes for the tasks know tokens alone
    settings = {"target_modules": targets, "task_type": task, **lora_kwargs}
    if not isinstance(settings.get("exclude_modules"), str):
        # A target that is the end of a name, such as "query", would match them.
        settings["exclude_modules"] = [*guards, *(settings.get("exclude_modules") or [])]
    modules_to_save = [*whole, *guards, *(lora_kwargs.get("modules_to_save") or [])]
    return LoraConfig(**{**settings, "modules_to_save": modules_to_save})


def load_lora(model: PreTrainedModel, adapter: Any, **kwargs: Any) -> PeftModel:
    """`PeftModel.from_pretrained`, for a base that is patched as the adapter's was.

    PEFT by itself refuses a stock base and a base of another fingerprint. But if the base has fewer patched layers, PEFT ignores
    the synthesizers of the others.

    Args:
        model: the patched base model.
        adapter: the adapter's folder, or its name on the Hub.
        **kwargs: for `PeftModel.from_pretrained`.

    Raises:
        NotPatchedError: for a base without synthesized layers.
        CheckpointMismatchError: for a base that is patched in another way.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    _require_patched(model, "the adapter was trained on a patched one")
    hub_arguments = {key: kwargs[key] for key in ("subfolder", "revision", "cache_dir", "token") if key in kwargs}
    in_adapter = load_peft_weights(adapter, device="cpu", use_safetensors=True, **hub_arguments)
    in_model: dict[str, Any] = {}
    try:
        loaded = PeftModel.from_pretrained(model, adapter, **kwargs)
        in_model = get_peft_model_state_dict(loaded, adapter_name=loaded.active_adapter)
    except (KeyError, RuntimeError) as error:
        reason = f"{error}"
    else:
        strange = sorted(in_adapter.keys() ^ in_model.keys())
        if not strange:
            return loaded
        reason = f"{strange[0]!r} is in one of them only"
    raise CheckpointMismatchError(
        f"The adapter {str(adapter)!r} does not fit this {type(model).__name__}, which is patched in another way than its "
        f"base model was: {reason}. Load the base model that its adapter_config.json names."
    )


def _require_patched(model: PreTrainedModel, otherwise: str) -> None:
    if not is_patched(model):
        raise NotPatchedError(
            f"This {type(model).__name__} holds no synthesized attention. Call patch_model() on it first, or load the "
            f"patched checkpoint; {otherwise}."
        )
