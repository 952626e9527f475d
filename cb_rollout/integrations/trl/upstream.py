"""Import the names of TRL that this folder uses; no other file of it imports trl."""

import trl as trl
from trl import GRPOTrainer as GRPOTrainer
from trl import RLOOTrainer as RLOOTrainer
from trl.data_utils import prepare_multimodal_messages as prepare_multimodal_messages
from trl.generation.vllm_generation import VLLMGeneration as VLLMGeneration
from trl.trainer import utils as utils
