"""What is called or replaced in TRL has the arguments of TRL 1.16."""

import inspect

import pytest
import torch
import trl.trainer.utils
from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer
from trl.experimental.gold import GOLDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.experimental.sdft import SDFTTrainer
from trl.experimental.sdpo import SDPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from cb_rollout.integrations.trl.attachment import SCORED_METHODS
from cb_rollout.integrations.trl.on_policy import SEAMS
from cb_rollout.integrations.trl.ordered_head import FUSED_HEAD

SCORED = {
    "_generate": "prompts",
    "_generate_and_score_completions": "inputs",
    "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
    "_get_per_token_logps_and_entropies": (
        "model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, "
        "compute_aux_loss, pixel_values, image_grid_thw, num_images, pixel_attention_mask, "
        "spatial_shapes, num_tiles, image_sizes, token_type_ids, mm_token_type_ids, "
        "image_position_ids"
    ),
    "compute_loss": "model, inputs, return_outputs, num_items_in_batch",
    "_compute_loss": "model, inputs",
    "_tokenize_prompts": "prompts",
}
SIGNATURES = {
    GRPOTrainer: SCORED
    | {
        "_generate_single_turn": (
            "prompt_ids, images, multimodal_fields, num_generations, has_tool_images"
        ),
        "_tool_call_loop": (
            "prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields"
        ),
    },
    RLOOTrainer: SCORED | {"_generate_single_turn": "prompt_ids, images, multimodal_fields"},
    DistillationTrainer: {"_generate": "prompts"},
    GOLDTrainer: {
        "_generate_on_policy_for_slices": "slices, on_policy_indices",
        "_generate_on_policy_vlm_raw": "raw_slices, on_policy_indices",
    },
    IWOPDTrainer: {"_generate_student_completions": "slices, on_policy_indices"},
    OnlineDPOTrainer: {"_generate": "model, prompts, images"},
    SDFTTrainer: {"_generate": "prompt_ids"},
    SDPOTrainer: {"_generate": "prompt_ids"},
    VLLMGeneration: {"generate": "prompts, images, num_generations, profiler"},
}
METHODS = [(owner, name) for owner, methods in SIGNATURES.items() for name in methods]


@pytest.mark.parametrize(
    ("owner", "name"), METHODS, ids=[f"{owner.__name__}.{name}" for owner, name in METHODS]
)
def test_a_method_has_the_arguments_it_had(owner, name):
    _, *found = inspect.signature(getattr(owner, name)).parameters
    assert ", ".join(found) == SIGNATURES[owner][name]


def test_every_method_that_attach_replaces_is_listed():
    for owner in (GRPOTrainer, RLOOTrainer):
        assert set(SCORED_METHODS) <= SIGNATURES[owner].keys()
    known = {owner.__name__: methods for owner, methods in SIGNATURES.items()}
    for name, seam in SEAMS.items():
        assert set(seam.methods) == known[name].keys()


def test_the_fused_head_is_where_it_was():
    assert issubclass(getattr(trl.trainer.utils, FUSED_HEAD), torch.autograd.Function)
