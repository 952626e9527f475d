"""The ten lines with a tool of docs/environments.md, without their model."""

from importlib.resources import files
from types import SimpleNamespace

import documented
import pytest
from datasets import Dataset
from tiny import char_tokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig
from trl.chat_template_utils import supports_tool_calling


def test_the_documented_tool_has_a_schema_and_its_reward_reads_the_last_message(tmp_path):
    attached = []
    names = documented.run(
        documented.block("A tool in ten lines", "docs/environments.md"),
        {
            "Dataset": Dataset,
            "GRPOConfig": lambda **settings: GRPOConfig(
                output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings
            ),
            "GRPOTrainer": lambda model, **arguments: SimpleNamespace(
                train=lambda: None, **arguments
            ),
            "attach": attached.append,
        },
    )
    (trainer,) = attached
    (tool,) = trainer.tools
    schema = get_json_schema(tool)["function"]
    assert schema["name"] == "multiply"
    assert schema["parameters"]["required"] == ["a", "b"]
    row = trainer.train_dataset[0]
    said = [
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "name": "multiply", "content": str(tool(12, 12))},
        {"role": "assistant", "content": "It is 144."},
    ]
    assert names["is_right"]([said, said[:1]], [row["answer"]] * 2) == [1.0, 0.0]


TEMPLATES = {
    True: [
        *("qwen2_5", "qwen3", "qwen3_5_think", "qwen3_vl", "llama3_1", "llama3_2", "gemma4"),
        *("lfm2_v2", "lfm2_2_5", "gptoss", "glm4moe", "deepseekv3", "nemotron_3_nano"),
    ],
    False: [
        *("qwen2_5_vl", "llama3", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "smolvlm"),
        *("phi3", "phi3_5", "cohere", "cohere2", "idefics3", "llava_next"),
    ],
}


@pytest.mark.parametrize("is_supported", [True, False])
def test_the_models_that_call_tools_are_those_of_the_page(is_supported):
    folder = files("trl.chat_templates")
    wrong = []
    for name in TEMPLATES[is_supported]:
        tokenizer = char_tokenizer()
        tokenizer.chat_template = folder.joinpath(f"{name}.jinja").read_text()
        if supports_tool_calling(tokenizer) is not is_supported:
            wrong.append(name)
    assert wrong == []
