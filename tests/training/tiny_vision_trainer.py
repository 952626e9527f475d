"""A stock trainer of a tiny vision-language model, for tests and for the processes they start."""

import re

from datasets import Dataset, Image
from tiny_trainer import in_own_names
from tiny_vision import picture, tiny_vision_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 2, 2, 4

DEFAULTS = {
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": NUM_PROMPTS * NUM_GENERATIONS,
    "num_generations": NUM_GENERATIONS,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "activation_checkpointing": False,
    "beta": 0.0,
}
EVEN_WORD = re.compile(r"w\d*[02468]\b")

# A template that renders calls, and the marker that a processor expands.
TOOL_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}w51 <image> w52 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message.get('tool_calls') or [] %}"
    "w53 {{ call.function.name }} {{ call.function.arguments }} "
    "{% endfor %}<eos> {% endfor %}{% if add_generation_prompt %}w50{% endif %}"
)


def share_of_even_words(completions, **_):
    """A reward that differs within a group."""
    return [len(EVEN_WORD.findall(str(completion))) / 10 for completion in completions]


def rows(columns):
    asked = [{"role": "user", "content": "w60 w61"}]
    found = {
        "image": [{"prompt": asked, "image": picture(i, (30 + 8 * i, 40))} for i in range(4)],
        "images": [
            {"prompt": asked, "images": [picture(i), picture(i + 1)][: 1 + i % 2]} for i in range(4)
        ],
        "none": [{"prompt": asked, "n": i} for i in range(4)],
    }[columns]
    dataset = Dataset.from_list(found)
    return dataset.cast_column("image", Image()) if columns == "image" else dataset


def vision_trainer(
    tmp_path,
    model_type="qwen2_5_vl",
    columns="image",
    is_rloo=False,
    is_tower_frozen=False,
    num_rows=4,
    peft_config=None,
    tools=None,
    image_token="<image>",
    made=None,
    **settings,
):
    model, processor = made or tiny_vision_model(model_type, image_token)
    if is_tower_frozen:
        model.model.visual.requires_grad_(False)
    # As TRL loads it.
    processor.tokenizer.padding_side = "left"
    if tools:
        template = TOOL_TEMPLATE.replace("<image>", image_token)
        processor.chat_template = processor.tokenizer.chat_template = template
        processor.tokenizer.response_template = "parsed by the test"
    trainer_class, config_class = (
        (RLOOTrainer, RLOOConfig) if is_rloo else (GRPOTrainer, GRPOConfig)
    )
    return trainer_class(
        model=model,
        reward_funcs=share_of_even_words,
        args=config_class(
            **{"output_dir": str(tmp_path)} | in_own_names(config_class, DEFAULTS) | settings
        ),
        processing_class=processor,
        train_dataset=rows(columns).select(range(num_rows)),
        peft_config=peft_config,
        **({"tools": tools} if tools else {}),
    )
