"""Findings about a machine and a checkpoint, for `cb-rollout doctor`.

A fault of the checkpoint is the last finding, and never an exception.
"""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement
from transformers import PreTrainedModel

import cb_rollout
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.multimodal import reads_images, text_tokenizer
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.attention.selector import select_backend
from cb_rollout.engine.cuda_graphs.selection import graph_obstacle
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.sizing import gathered_bytes_per_token, workspace_bytes_per_request
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory import plan as memory_plans
from cb_rollout.engine.memory.plan import GIB, Part
from cb_rollout.engine.memory.system import NO_LIMIT, container_memory
from cb_rollout.engine.memory.training import optimizer_state_bytes
from cb_rollout.engine.model.probe import probe
from cb_rollout.engine.model.runner import BatchLayout
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO
from cb_rollout.errors import ConfigurationError, RolloutError, error_text
from cb_rollout.packing.batch import PackedRow
from cb_rollout.packing.logprobs import loss_path
from cb_rollout.rollout import checkpoint
from cb_rollout.rollout.generator import RolloutGenerator

# The longest name of a finding, and a space.
NAME_WIDTH = 26

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "wandb")

KERNELS = ("flash_attn", "kernels", "triton", "torch.nn.attention.varlen")

# The packages of each extra.
EXTRAS = {"server": ("fastapi", "uvicorn"), "grammar": ("xgrammar",), "ray": ("ray",)}

# Prompt lengths, in tokens: one below the block size and one above the probe's, so that rows are
# padded.
PROMPT_TOKENS = (3, 17)
NEW_TOKENS = 8
SEQUENCES_EACH = 2

# Width and height of the picture, in pixels.
PICTURE = (64, 48)

# Of a GPU that is not here: what its driver and libraries take, assumed.
DRIVER_GIB = 2

# Tensors of a layer that its backward pass reads, as multiples of the hidden size and of the
# intermediate size: inputs of norms and products, queries, keys and values, the MLP's parts.
SAVED_HIDDEN, SAVED_INTERMEDIATE = 14, 4


class Level(IntEnum):
    """The severity of a finding; the worst severity decides the exit code."""

    OK = 0
    WARNING = 1
    BAD = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor's output."""

    level: Level
    name: str
    text: str

    def __str__(self) -> str:
        mark = {Level.OK: "  ", Level.WARNING: "! ", Level.BAD: "X "}[self.level]
        return f"{mark}{self.name:<{NAME_WIDTH}} {' '.join(self.text.split())}"


def _ok(name: str, text: str) -> Finding:
    return Finding(Level.OK, name, text)


def machine_findings(device: str = "auto") -> Iterator[Finding]:
    """Yield findings on versions, extras, kernels, the device and its memory."""
    yield _ok("cb_rollout", cb_rollout.__version__)
    yield _ok("python", platform.python_version())
    requirements = _requirements()
    for package in PACKAGES:
        yield _version(package, requirements)
    for extra, modules in EXTRAS.items():
        missing = ", ".join(name for name in modules if not _is_there(name))
        text = f"lacks {missing}; pip install 'cb_rollout[{extra}]'" if missing else "found"
        yield _ok(f"extra {extra!r}", text)
    for name in KERNELS:
        yield _ok(name, "found" if _is_there(name) else "not found")
    try:
        target = checkpoint.torch_device(device)
    except ConfigurationError as error:
        yield Finding(Level.BAD, "device", str(error))
        return
    yield _ok("attention", str(select_backend(target)))
    obstacle = graph_obstacle(target)
    text = f"not used: use_cuda_graph=True {obstacle}" if obstacle else "where the model allows"
    yield _ok("CUDA graphs", text)
    yield from _device(target)


def _requirements() -> dict[str, Requirement]:
    try:
        requirements = map(Requirement, importlib.metadata.requires("cb_rollout") or ())
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {r.name: r for r in requirements if r.marker is None}


def _version(package: str, requirements: dict[str, Requirement]) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(Level.WARNING, package, "is missing; training with it needs it")
    if package not in requirements:
        return _ok(package, f"{version} (cb_rollout is not installed: not compared)")
    tested = requirements[package].specifier
    if tested.contains(version, prereleases=True):
        return _ok(package, f"{version} (tested: {tested})" if tested else version)
    text = f"{version} is outside what is tested; pip install '{package}{tested}'"
    return Finding(Level.WARNING, package, text)


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _device(target: torch.device) -> Iterator[Finding]:
    if target.type == "cuda":
        properties = torch.cuda.get_device_properties(target)
        text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        if (count := torch.cuda.device_count()) > 1:
            text += f", the first used of {count}; one process uses one"
    else:
        text = f"{target.type}, {torch.get_num_threads()} threads of {psutil.cpu_count()} cores"
        if not torch.cuda.is_available():
            text += f"; no GPU: torch {torch.__version__} sees none"
    yield _ok("device", text)
    memory = devices.memory(target)
    free, total = memory.free_bytes / GIB, memory.total_bytes / GIB
    yield _ok("memory free", f"{free:.1f} of {total:.1f} GiB on {target.type}")
    if target.type == "cuda":
        return
    container, text = container_memory(), "none"
    if container != NO_LIMIT:
        left, limit = container.free_bytes / GIB, container.total_bytes / GIB
        text = f"{left:.1f} GiB left of {limit:.1f}; counted above"
    yield _ok("container limit", text)


def checkpoint_findings(
    name: str, dtype: str = "auto", max_memory_percent: float = 0.8, *, device: str = "auto"
) -> Iterator[Finding]:
    """Load a checkpoint, probe it, generate a few tokens, and yield the findings.

    "auto" is the checkpoint's dtype, and a GPU if there is any.
    """
    try:
        config = RolloutConfig(max_memory_percent=max_memory_percent, seed=0)
        model = checkpoint.load_model(name, dtype, device)
        yield _model(name, model)
        tokenizer, finding = _tokenizer(name)
        yield finding
        with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
            yield from _cache(generator.manager.engine.layout)
            yield _batch_layout(generator.manager.engine.runner.batch_layout)
            yield from _memory(generator, model)
            yield _comparison(generator, model)
            yield from _paths(generator, model)
            yield _images(name, generator, model)
    except Exception as error:  # noqa: BLE001  a model may raise anything
        text = f"cannot be rolled out ({error_text(error)}); use model.generate"
        yield Finding(Level.BAD, "model", str(error) if isinstance(error, RolloutError) else text)


def _model(name: str, model: PreTrainedModel) -> Finding:
    size = sum(parameter.nbytes for parameter in model.parameters()) / GIB
    text = f"{model.num_parameters():,} parameters in {torch_compat.compute_dtype(model)}"
    return _ok("model", f"{name}: {type(model).__name__}, {text}, {size:.2f} GiB")


def _tokenizer(name: str) -> tuple[Any, Finding]:
    try:
        tokenizer = checkpoint.load_tokenizer(name)
    except ConfigurationError as error:
        return None, Finding(Level.WARNING, "tokenizer", str(error))
    template = "without" if getattr(tokenizer, "chat_template", None) is None else "with a"
    num_tokens = len(text_tokenizer(tokenizer))
    return tokenizer, _ok("tokenizer", f"{num_tokens:,} tokens, {template} chat template")


def _cache(layout: CacheLayout) -> Iterator[Finding]:
    num_paged = sum(bool(x.per_token) for x in layout.layers)
    num_recurrent = sum(x.is_recurrent for x in layout.layers)
    num_neither = sum(not (x.is_recurrent or x.per_token) for x in layout.layers)
    counts = f"{num_paged} with keys and values, {num_recurrent} with recurrent states"
    yield _ok("layers", f"{counts}, {num_neither} with neither")
    yield _ok("bytes per token", f"{layout.bytes_per_token:,}")
    yield _ok("bytes per sequence", f"{layout.bytes_per_sequence:,}")
    why_not = "not used: recurrent states cannot be continued from keys"
    yield _ok("chunks, known prefixes", why_not if layout.is_recurrent else "used")


def _batch_layout(layout: BatchLayout) -> Finding:
    texts = {
        BatchLayout.PACKED: "of any lengths together in one forward, prompts without padding",
        BatchLayout.PADDED: "of any lengths together in one forward",
        BatchLayout.EQUAL_LENGTHS: "of equal length together; others take a forward each, because "
        "the model counts positions itself or takes no padding",
        BatchLayout.SINGLE_ROWS: "one to a forward, because the model mixes the rows of a batch; "
        "slow",
    }
    level = Level.OK if layout.takes_any_lengths else Level.WARNING
    return Finding(level, "sequences run", texts[layout])


def _memory(generator: RolloutGenerator, model: PreTrainedModel) -> Iterator[Finding]:
    manager, plan = generator.manager, generator.memory_plan()
    for name, size, note in plan.parts:
        yield _ok(f"memory, {name}", f"{size / GIB:.2f} GiB  {note}")
    yield _ok("sequences together", f"{plan.num_slots:,} at most")
    num_tokens = plan.num_blocks * manager.config.block_size
    longest = hf_compat.max_positions(model)
    most = min(manager.limits.max_cached_tokens(), longest or num_tokens)
    yield _ok(
        "max tokens",
        f"{num_tokens:,} cached at once; {most:,}"
        f" in one sequence (the model's own limit: {longest or 'none named'})",
    )


def _paths(generator: RolloutGenerator, model: PreTrainedModel) -> Iterator[Finding]:
    """Yield what each part runs by; a warning where a GPU could run it faster."""
    engine = generator.manager.engine
    ids = list(hf_compat.text_token_ids(model))[: sum(PROMPT_TOKENS)]
    row = PackedRow(ids[: PROMPT_TOKENS[0]], ids[PROMPT_TOKENS[0] :])
    for path in (*engine.paths, loss_path(model, [row] * SEQUENCES_EACH)):
        is_lost = path.obstacle and graph_obstacle(engine.device) is None
        yield Finding(Level.WARNING if is_lost else Level.OK, path.part, path.text)


def _comparison(generator: RolloutGenerator, model: PreTrainedModel) -> Finding:
    vocab_size = hf_compat.vocab_size(model)
    prompts = [[(7 * i + 3) % vocab_size for i in range(length)] for length in PROMPT_TOKENS]
    is_close, text = _drift(generator, prompts)
    if is_close:
        return _ok("rollout against forward", text)
    text += "; this model cannot be rolled out here, use model.generate and report it with this "
    return Finding(Level.BAD, "rollout against forward", f"{text}output")


def _drift(generator: RolloutGenerator, prompts: list[Any]) -> tuple[bool, str]:
    """Generate, and say how far log-probabilities are from those of a plain forward."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    generator.generate_batch(prompts, sampling_params=params, num_return_sequences=SEQUENCES_EACH)
    drift = generator.verify(len(prompts) * SEQUENCES_EACH)
    return bool(drift.agreement), f"{drift.num_tokens} tokens, {drift.agreement}"


def _images(name: str, generator: RolloutGenerator, model: PreTrainedModel) -> Finding:
    """Generate about a picture, and compare with a plain forward; or say why not."""
    if not reads_images(model.config):
        return _ok("images", "not read by this model")
    try:
        processor = checkpoint.load_processor(name)
        # A processor of images needs it; other checkpoints do not.
        from PIL import Image

        picture = Image.linear_gradient("L").resize(PICTURE).convert("RGB")
        prompt: Any = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
        if getattr(processor, "chat_template", None) is None:
            marker = getattr(processor, "image_token", "<image>")
            prompt = {"prompt": marker, "images": [picture]}
        is_close, text = _drift(generator, [prompt])
    except RolloutError as error:
        return Finding(Level.WARNING, "images", f"are refused: {error}")
    if is_close:
        return _ok("images", f"run: {text}")
    return Finding(Level.WARNING, "images", f"do not run: {text}; use model.generate for them")


def computed_findings(
    name: str, gpu_gib: float, lora_rank: int, loss_tokens: int, dtype: str, percent: float
) -> Iterator[Finding]:
    """Yield the memory of a step of GRPO on a GPU that need not be here.

    It is computed from a checkpoint's config alone: nothing is measured. Weights of `dtype`
    ("auto": the checkpoint's) are trained by AdamW, those of float32 under bfloat16 autocast; with
    a `lora_rank` adapters on all linear layers but the head. `loss_tokens` are a micro-batch's,
    each prompt once; `percent` is the cache's share of what training leaves.
    """
    yield _ok("computed, not measured", f"{name} on a GPU of {gpu_gib:g} GiB")
    try:
        checkpoint.require_dtype(dtype)
        with torch_compat.without_values(), torch.no_grad():
            model, saved_dtype = checkpoint.shape_of_model(name)
            argument = hf_compat.cache_argument(model) or "past_key_values"
            layout = probe(model.config, lambda ids, cache: model(ids, **{argument: cache}))
        held = saved_dtype if dtype == "auto" else getattr(torch, dtype)
        rows, plan = _memory_rows(model, layout, gpu_gib, lora_rank, held, percent)
    except Exception as error:  # noqa: BLE001  a model may raise anything
        text = f"its config does not say enough ({error_text(error)}); run doctor on the GPU"
        yield Finding(Level.BAD, "model", str(error) if isinstance(error, RolloutError) else text)
        return
    # One input of each checkpointed layer, and all of one layer, which is computed again.
    config = model.config.get_text_config(decoder=True)
    elements = (config.num_hidden_layers + SAVED_HIDDEN) * config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    size = loss_tokens * (elements + SAVED_INTERMEDIATE * inner) * torch.bfloat16.itemsize
    rows.append(Part("activations", size, f"{loss_tokens:,} tokens, an estimate"))
    yield from (_ok(x.name, f"{x.num_bytes / GIB:.2f} GiB, {x.note}") for x in rows if x.num_bytes)
    for name, parts in (("in a rollout", rows[:9]), ("in the loss", rows[:6] + rows[9:])):
        size = sum(part.num_bytes for part in parts) / GIB
        fits = size <= gpu_gib and plan.has_room
        text = f"{gpu_gib - size:.1f} GiB left" if fits else "does not fit: docs/tasks/one_gpu.md"
        yield Finding(Level.OK if fits else Level.BAD, name, f"{size:.2f} GiB, {text}")


def _memory_rows(
    model: PreTrainedModel,
    layout: CacheLayout,
    gpu_gib: float,
    lora_rank: int,
    held: torch.dtype,
    percent: float,
) -> tuple[list[Part], memory_plans.MemoryPlan]:
    computing = torch.bfloat16 if held == torch.float32 else held
    head, num, cuda = model.get_output_embeddings(), model.num_parameters(), torch.device("cuda")
    linear = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x is not head]
    num_adapters = sum(lora_rank * (x.in_features + x.out_features) for x in linear)
    base, adapters = num * held.itemsize, num_adapters * torch.float32.itemsize
    num_trained, gradients = (num_adapters, adapters) if lora_rank else (num, base)
    states = optimizer_state_bytes("adamw", {}, num_trained, gradients)
    free, copy = int((gpu_gib - DRIVER_GIB) * GIB) - base - adapters, num * computing.itemsize
    # As `cb_rollout.weights` decides: a copy that casts nothing must leave room.
    leaves_room = devices.FREE_PER_COPY * copy <= free - gradients - states
    copy *= held != computing or (lora_rank > 0 and leaves_room)
    num_heads = hf_compat.num_query_heads(model)
    plan = memory_plans.create_memory_plan(
        memory_plans.MemoryModel(
            total_bytes=max(0, free - copy),
            free_bytes=max(0, free - copy),
            training=memory_plans.TrainingBytes(
                gradients_to_come=gradients, optimizer_states_to_come=states
            ),
            max_memory_percent=percent,
            block_size=RolloutConfig.block_size,
            max_requests=devices.max_requests_per_batch(cuda),
            max_batch_tokens=devices.max_batch_tokens(cuda),
            bytes_per_token=layout.bytes_per_token,
            bytes_per_sequence=layout.bytes_per_sequence,
            workspace_bytes_per_request=workspace_bytes_per_request(hf_compat.vocab_size(model)),
            gathered_bytes_per_token=gathered_bytes_per_token(layout, num_heads, computing),
            history_factor=1 if layout.is_recurrent else MAX_GATHER_RATIO,
            max_sequence_tokens=hf_compat.max_positions(model),
        )
    )
    cached = f"{plan.num_blocks * plan.block_size:,} tokens of {plan.bytes_per_token:,} B"
    return [
        Part("driver and libraries", DRIVER_GIB * GIB, "assumed"),
        Part("weights", base, f"{num:,} in {held}"),
        Part("adapters", adapters, f"{num_adapters:,} in float32, rank {lora_rank}"),
        Part("gradients", gradients, f"of {num_trained:,}"),
        Part("AdamW states", states, f"of {num_trained:,}"),
        Part("engine's copy", copy, f"{computing}{', adapters merged' * bool(lora_rank)}"),
        Part("forward workspace", plan.forward_bytes, f"{plan.max_requests} rows of logits; keys"),
        Part("states of sequences", plan.state_bytes, f"{plan.num_slots:,} sequences"),
        Part("KV cache at most", plan.kv_bytes, cached),
    ], plan
