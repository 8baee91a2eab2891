"""What the documents show as code, and what each of them takes as given."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.helpers.glue_rows import write_tasks
from tests.helpers.models import build
from tests.helpers.word_tokenizer import save_tokenizer

ROOT = Path(__file__).parents[2]
GENERATED = ("compatibility_tests.md", "contributing.md", "changelog.md")
"""Pages of docs/ that hold nothing of their own."""
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (
        *(
            ROOT / name
            for name in (
                "README.md",
                "CONTRIBUTING.md",
                "CHANGELOG.md",
                "SECURITY.md",
                "CODE_OF_CONDUCT.md",
                "benchmarks/README.md",
            )
        ),
        *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
        ROOT / "benchmarks" / "tried.md",
        *sorted((ROOT / "benchmarks").glob("*/results.md")),
    )
}

CLASSIFIER = """
import copy, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments
from hf_synthesizer import patch_model
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased", model_max_length=24)
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased").eval()
"""
ROWS = """
rows = [{**tokenizer(f"w{n} w{n + 1} w{n % 7 + 8}"), "labels": n % 2} for n in range(4, 36)]
collate = DataCollatorWithPadding(tokenizer)
dataloader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
"""
TRAINER = """
from transformers import Trainer
train_dataset = eval_dataset = rows
training_arguments = TrainingArguments("out", max_steps=2, report_to=[], disable_tqdm=True)
"""
GIVEN = {
    "docs/checkpoints.md": CLASSIFIER
    + ROWS
    + TRAINER
    + """
from transformers import AutoModel, BertLMHeadModel
patch_model(copy.deepcopy(model), "factorized_dense").save_pretrained("me/bert-factorized-dense")
tokenizer.save_pretrained("me/bert-factorized-dense")
encoder, decoder = (AutoModel.from_pretrained("bert-base-uncased") for _ in range(2))
decoder = BertLMHeadModel.from_pretrained("bert-base-uncased", is_decoder=True, add_cross_attention=True)
trained = patch_model(copy.deepcopy(model), "random")
trainer = Trainer(trained, TrainingArguments("me-model", report_to=[]), processing_class=tokenizer)
""",
    "docs/export.md": CLASSIFIER
    + "tokenizer.add_tokens(['an', 'example', 'another'])\npatch_model(model, 'random')\n",
    "docs/scaling.md": CLASSIFIER
    + """
import types
patch_model(model, "random")
leaves = []
deepspeed = types.SimpleNamespace(utils=types.SimpleNamespace(set_z3_leaf_modules=lambda model, found: leaves.extend(found)))
""",
    "docs/training.md": CLASSIFIER
    + ROWS
    + TRAINER
    + """
import accelerate
patch_model(model, "random")
model.save_pretrained("my-patched-base")
tokenizer.save_pretrained("my-patched-base")
accelerator = accelerate.Accelerator(cpu=True)
torch.distributed.init_process_group("gloo", init_method="file:///{folder}/store", rank=0, world_size=1)
rank = 0
""",
    "docs/transfer.md": CLASSIFIER + ROWS,
}
"""Code that runs before the code of a page; `{folder}` is where it runs."""
INSTEAD = {
    "steps=900": "steps=9",  # an hour of training
    'init_device_mesh("cpu", (2,))': 'init_device_mesh("cpu", (1,))',  # one process is there
    'Dim("length", min=2, max=512)': 'Dim("length", min=2, max=24)',  # so long is the tiny model's input
    "max_length=128": "max_length=24",
    "model_max_length=128": "model_max_length=24",
    "from hf_synthesizer.peft import load_lora,": 'model = AutoModelForSequenceClassification.from_pretrained("my-patched-base")\n'
    "from hf_synthesizer.peft import load_lora,",  # the model of the block before is sharded
    "from hf_synthesizer import suggest_": "model = copy.deepcopy(teacher)\nfrom hf_synthesizer import suggest_",  # patched above
    "accelerator.end_training()": "",
}
"""What is other in a tiny model's world."""


def python_of(name: str) -> list[str]:
    """The Python code of a document, block by block."""
    text = DOCUMENTS[name].read_text(encoding="utf-8")
    found = re.findall(r"^([ ]*)```python\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


def program_of(name: str, folder: Path) -> str:
    """All code of a document as one program, in the order in which it is read."""
    code = "\n".join(python_of(name))
    for shown, run in INSTEAD.items():
        code = code.replace(shown, run)
    return GIVEN.get(name, "").replace("{folder}", str(folder).lstrip("/")) + code


def write_world(folder: Path) -> None:
    """Tiny models and data under the names that documents use."""
    build("BertModel", num_hidden_layers=3).save_pretrained(folder / "bert-base-uncased")
    save_tokenizer(folder / "bert-base-uncased")
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    build("LlamaForCausalLM", **small).save_pretrained(folder / "HuggingFaceTB" / "SmolLM2-135M")
    build("ViTForImageClassification").save_pretrained(folder / "google" / "vit-base-patch16-224")
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    write_tasks(data)
    (data / "README.md").write_text("---\nconfigs:\n- config_name: sst2\n  data_dir: sst2\n---\n")
