"""Adapters of PEFT in a model that is to be patched."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError


def require_no_adapters(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` for a model into which PEFT has put adapters already.

    They were chosen for the stock layers: the synthesizers would be neither trained nor saved with them.
    """
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    adapted = (BaseTunerLayer, ModulesToSaveWrapper)
    adapter = next((name for name, module in model.named_modules() if isinstance(module, adapted)), None)
    if adapter is not None:
        raise UnsupportedModelError(
            f"This {type(model).__name__} has adapters of PEFT, the first at {adapter!r}, which would neither train nor save "
            f"the synthesizers. Patch first, then add adapters: patch_model(model, …), then get_peft_model(model, "
            f"lora_config_for(model)) with hf_synthesizer.peft. To patch what was trained so, merge it before: "
            f"patch_model(peft_model.merge_and_unload(), …)."
        )
