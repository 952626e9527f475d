"""Findings about a machine and a checkpoint, for `cb-rollout doctor`.

A fault of the checkpoint becomes the last finding, never an exception.
"""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from contextlib import nullcontext
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
from cb_rollout.engine.attention.cpu.linear import has_kernel
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
from cb_rollout.engine.numerics.kernels import kernel
from cb_rollout.engine.numerics.qualification import qualifier
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO
from cb_rollout.errors import ConfigurationError, RolloutError, error_text
from cb_rollout.packing.logprobs import loss_path
from cb_rollout.packing.rows import PackedRow
from cb_rollout.rollout import checkpoint
from cb_rollout.rollout.generator import RolloutGenerator

# The longest name of a finding, and a space.
NAME_WIDTH = 26

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "wandb")

KERNELS = ("flash_attn", "kernels", "triton", "torch.nn.attention.varlen")

# The packages of each extra.
EXTRAS = {"server": ("fastapi", "uvicorn"), "grammar": ("xgrammar",), "ray": ("ray",)}

# Prompt lengths, in tokens. They differ, so that rows are padded, and new tokens take the second
# beyond its first block.
PROMPT_TOKENS = (3, 29)
NEW_TOKENS = 8
SEQUENCES_EACH = 2

# Width and height of the picture, in pixels.
PICTURE = (64, 48)

# GiB that the driver and libraries are assumed to take on a GPU that is not here.
DRIVER_GIB = 2

# Numbers that a layer saves for each token for its backward pass, as multiples of the hidden size
# (inputs of norms and products, queries, keys and values) and of the intermediate size (the MLP's).
SAVED_HIDDEN = 14
SAVED_INTERMEDIATE = 4

# An MLP of this many hidden sizes is assumed if the config names no intermediate size.
USUAL_INTERMEDIATE = 4


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
        missing = [name for name in modules if not _is_there(name)]
        text = "found"
        if missing:
            text = f"lacks {', '.join(missing)}; pip install 'cb_rollout[{extra}]'"
        yield _ok(f"extra {extra!r}", text)
    for name in KERNELS:
        text = "not found"
        if _is_there(name):
            text = "found"
        yield _ok(name, text)
    try:
        target = checkpoint.torch_device(device)
    except ConfigurationError as error:
        yield Finding(Level.BAD, "device", str(error))
        return
    yield _ok("attention", str(select_backend(target)))
    obstacle = graph_obstacle(target)
    if obstacle:
        yield _ok("CUDA graphs", f"not used: use_cuda_graph=True {obstacle}")
    else:
        yield _ok("CUDA graphs", "where the model allows")
    yield _device(target)
    yield from _free_memory(target)


def _requirements() -> dict[str, Requirement]:
    """Return the requirements of an install without extras, by package name."""
    try:
        texts = importlib.metadata.requires("cb_rollout") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements: dict[str, Requirement] = {}
    for text in texts:
        requirement = Requirement(text)
        # A requirement with a marker belongs to an extra.
        if requirement.marker is None:
            requirements[requirement.name] = requirement
    return requirements


def _version(package: str, requirements: dict[str, Requirement]) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(Level.WARNING, package, "is missing; training with it needs it")
    if package not in requirements:
        return _ok(package, f"{version} (cb_rollout is not installed: not compared)")
    supported = requirements[package].specifier
    if not supported.contains(version, prereleases=True):
        text = f"{version} is not supported; pip install '{package}{supported}'"
        return Finding(Level.WARNING, package, text)
    if not supported:
        return _ok(package, version)
    return _ok(package, f"{version} (supported: {supported})")


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _device(target: torch.device) -> Finding:
    if target.type == "cuda":
        properties = torch.cuda.get_device_properties(target)
        text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        num_gpus = torch.cuda.device_count()
        if num_gpus > 1:
            text += f", the first used of {num_gpus}; one process uses one"
        return _ok("device", text)
    text = f"{target.type}, {torch.get_num_threads()} threads of {psutil.cpu_count()} cores"
    if not torch.cuda.is_available():
        text += f"; no GPU: torch {torch.__version__} sees none"
    return _ok("device", text)


def _free_memory(target: torch.device) -> Iterator[Finding]:
    memory = devices.memory(target)
    free_gib = memory.free_bytes / GIB
    total_gib = memory.total_bytes / GIB
    yield _ok("memory free", f"{free_gib:.1f} of {total_gib:.1f} GiB on {target.type}")
    if target.type == "cuda":
        return
    container = container_memory()
    if container == NO_LIMIT:
        yield _ok("container limit", "none")
        return
    left_gib = container.free_bytes / GIB
    limit_gib = container.total_bytes / GIB
    yield _ok("container limit", f"{left_gib:.1f} GiB left of {limit_gib:.1f}; counted above")


def checkpoint_findings(
    name: str,
    dtype: str = "auto",
    max_memory_percent: float = 0.8,
    *,
    device: str = "auto",
    qualifies: bool = False,
) -> Iterator[Finding]:
    """Load a checkpoint, probe it, generate a few tokens, and yield the findings.

    Args:
        name: the checkpoint's directory or hub name.
        dtype: dtype of the weights; "auto": the checkpoint's dtype.
        max_memory_percent: the cache's share of the free memory, from 0 to 1.
        device: the device to run on; "auto": a GPU if there is any.
        qualifies: True: repeat earlier trials, each in a separate process.
    """
    trying = nullcontext()
    if qualifies:
        trying = qualifier.trying_anew()
        # Kernels that this process has already loaded are tried too.
        kernel.cache_clear()
        has_kernel.cache_clear()
    with trying:
        yield from _checkpoint_findings(name, dtype, max_memory_percent, device, qualifies)


def _checkpoint_findings(
    name: str, dtype: str, max_memory_percent: float, device: str, qualifies: bool
) -> Iterator[Finding]:
    """Load a checkpoint, roll it out, and yield the findings.

    Args:
        name: the checkpoint's directory or hub name.
        dtype: dtype to load the checkpoint in.
        max_memory_percent: as in `RolloutConfig`.
        device: device to load the checkpoint on.
        qualifies: True: report it, too, if there was nothing to try.
    """
    try:
        config = RolloutConfig(max_memory_percent=max_memory_percent, seed=0)
        model = checkpoint.load_model(name, dtype, device)
        yield _model(name, model)
        tokenizer, finding = _tokenizer(name)
        yield finding
        with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
            yield from _cache(generator.manager.engine.paged_model.layout)
            yield _batch_layout(generator.manager.engine.runner.batch_layout)
            yield from _memory(generator, model)
            yield _comparison(generator, model)
            yield from _paths(generator, model)
            yield from _trials(qualifies)
            yield _images(name, generator, model)
    except RolloutError as error:
        yield Finding(Level.BAD, "model", str(error))
    except Exception as error:  # noqa: BLE001  a model may raise anything
        text = f"cannot be rolled out ({error_text(error)}); use model.generate"
        yield Finding(Level.BAD, "model", text)


def _model(name: str, model: PreTrainedModel) -> Finding:
    size = sum(parameter.nbytes for parameter in model.parameters()) / GIB
    text = f"{model.num_parameters():,} parameters in {torch_compat.compute_dtype(model)}"
    return _ok("model", f"{name}: {type(model).__name__}, {text}, {size:.2f} GiB")


def _tokenizer(name: str) -> tuple[Any, Finding]:
    try:
        tokenizer = checkpoint.load_tokenizer(name)
    except ConfigurationError as error:
        return None, Finding(Level.WARNING, "tokenizer", str(error))
    template = "with a"
    if getattr(tokenizer, "chat_template", None) is None:
        template = "without"
    num_tokens = len(text_tokenizer(tokenizer))
    return tokenizer, _ok("tokenizer", f"{num_tokens:,} tokens, {template} chat template")


def _cache(layout: CacheLayout) -> Iterator[Finding]:
    num_paged = 0
    num_recurrent = 0
    num_neither = 0
    for layer in layout.layers:
        if layer.per_token:
            num_paged += 1
        if layer.is_recurrent:
            num_recurrent += 1
        if not layer.per_token and not layer.is_recurrent:
            num_neither += 1
    counts = f"{num_paged} with keys and values, {num_recurrent} with recurrent states"
    yield _ok("layers", f"{counts}, {num_neither} with neither")
    yield _ok("bytes per token", f"{layout.bytes_per_token:,}")
    yield _ok("bytes per sequence", f"{layout.bytes_per_sequence:,}")
    use = "used"
    if layout.is_recurrent:
        use = "not used: recurrent states cannot be continued from keys"
    yield _ok("chunks, known prefixes", use)


def _batch_layout(layout: BatchLayout) -> Finding:
    texts = {
        BatchLayout.PACKED: "of any lengths together in one forward, prompts without padding",
        BatchLayout.PADDED: "of any lengths together in one forward",
        BatchLayout.EQUAL_LENGTHS: "of equal length together; others take a forward each, because "
        "the model counts positions itself or takes no padding",
        BatchLayout.SINGLE_ROWS: "one to a forward, because the model mixes the rows of a batch; "
        "slow",
    }
    level = Level.WARNING
    if layout.takes_any_lengths:
        level = Level.OK
    return Finding(level, "sequences run", texts[layout])


def _memory(generator: RolloutGenerator, model: PreTrainedModel) -> Iterator[Finding]:
    manager = generator.manager
    plan = generator.memory_plan()
    for part in plan.parts:
        yield _ok(f"memory, {part.name}", f"{part.num_bytes / GIB:.2f} GiB  {part.note}")
    yield _ok("sequences together", f"{plan.num_slots:,} at most")
    num_tokens = plan.num_blocks * manager.config.block_size
    max_positions = hf_compat.max_positions(model)
    max_sequence_tokens = min(manager.limits.max_cached_tokens(), max_positions or num_tokens)
    yield _ok(
        "max tokens",
        f"{num_tokens:,} cached at once; {max_sequence_tokens:,}"
        f" in one sequence (the model's own limit: {max_positions or 'none named'})",
    )


def _paths(generator: RolloutGenerator, model: PreTrainedModel) -> Iterator[Finding]:
    """Yield the path that each part runs on; warn if a GPU could run it faster."""
    engine = generator.manager.engine
    ids = list(hf_compat.text_token_ids(model))[: sum(PROMPT_TOKENS)]
    num_prompt_tokens = PROMPT_TOKENS[0]
    row = PackedRow(prompt_ids=ids[:num_prompt_tokens], completion_ids=ids[num_prompt_tokens:])
    paths = list(engine.paged_model.paths)
    paths.append(loss_path(model, [row] * SEQUENCES_EACH))
    can_run_graphs = graph_obstacle(engine.device) is None
    for path in paths:
        level = Level.OK
        if path.obstacle and can_run_graphs:
            level = Level.WARNING
        yield Finding(level, path.part, path.text)


def _trials(qualifies: bool) -> Iterator[Finding]:
    """Yield the verdict of each trial that this process asked for; warn if one failed."""
    if qualifier.is_switched_off():
        yield Finding(Level.WARNING, "trials", f"are switched off by {qualifier.SWITCH}")
        return
    trials = qualifier.trials()
    if qualifies and not trials:
        yield _ok("trials", "none: this model runs by nothing that is tried")
    for trial in trials:
        verdict = trial.verdict
        times = ""
        if verdict is not None:
            for path, milliseconds in verdict.milliseconds.items():
                times += f", {path} {milliseconds:.3f} ms"
        level = Level.WARNING
        if trial.is_proved:
            level = Level.OK
        yield Finding(level, "trial", f"{trial.subject.name}: {trial}{times}")


def _comparison(generator: RolloutGenerator, model: PreTrainedModel) -> Finding:
    vocab_size = hf_compat.vocab_size(model)
    longest_prompt = [(7 * i + 3) % vocab_size for i in range(max(PROMPT_TOKENS))]
    prompts = [longest_prompt[:length] for length in PROMPT_TOKENS]
    is_close, text = _drift(generator, prompts)
    if is_close:
        return _ok("rollout against forward", text)
    advice = "this model cannot be rolled out here, use model.generate and report it with this"
    return Finding(Level.BAD, "rollout against forward", f"{text}; {advice} output")


def _drift(generator: RolloutGenerator, prompts: list[Any]) -> tuple[bool, str]:
    """Generate, and report how far log-probabilities are from a plain forward's."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    generator.generate_batch(prompts, sampling_params=params, num_return_sequences=SEQUENCES_EACH)
    drift = generator.verify(len(prompts) * SEQUENCES_EACH)
    return bool(drift.agreement), f"{drift.num_tokens} tokens, {drift.agreement}"


def _images(name: str, generator: RolloutGenerator, model: PreTrainedModel) -> Finding:
    """Generate from a picture, and compare with a plain forward, or say why not."""
    if not reads_images(model.config):
        return _ok("images", "not read by this model")
    try:
        processor = checkpoint.load_processor(name)
        # Imported here: an image processor needs PIL, and other checkpoints do not.
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
    """Yield the memory of a GRPO step on a GPU, which need not be present.

    The memory is computed from a checkpoint's config; nothing is measured.

    Args:
        name: a checkpoint's directory or hub name.
        gpu_gib: the GPU's memory, in GiB.
        lora_rank: rank of adapters on all linear layers but the head; 0: all weights are trained.
        loss_tokens: tokens of a micro-batch, each prompt once.
        dtype: dtype of the weights; "auto": the checkpoint's. AdamW trains the weights; float32
            weights are trained under bfloat16 autocast.
        percent: the cache's share of the memory that training leaves, from 0 to 1.
    """
    yield _ok("computed, not measured", f"{name} on a GPU of {gpu_gib:g} GiB")
    try:
        checkpoint.require_dtype(dtype)
        with torch_compat.without_values(), torch.no_grad():
            model, saved_dtype = checkpoint.shape_of_model(name)
            argument = hf_compat.cache_argument(model) or "past_key_values"
            layout = probe(model.config, lambda ids, cache: model(ids, **{argument: cache}))
        weight_dtype = saved_dtype
        if dtype != "auto":
            weight_dtype = getattr(torch, dtype)
        trained = _trained_bytes(model, lora_rank, weight_dtype)
        resident, plan = _gpu_plan(model, layout, gpu_gib, trained, percent)
    except RolloutError as error:
        yield Finding(Level.BAD, "model", str(error))
        return
    except Exception as error:  # noqa: BLE001  a model may raise anything
        text = f"its config does not say enough ({error_text(error)}); run doctor on the GPU"
        yield Finding(Level.BAD, "model", text)
        return
    rollout_parts = [*resident, *_cache_parts(plan)]
    activations = _activations(model, loss_tokens)
    for part in [*rollout_parts, activations]:
        if part.num_bytes:
            yield _ok(part.name, f"{part.num_bytes / GIB:.2f} GiB, {part.note}")
    yield _fit("in a rollout", rollout_parts, gpu_gib, plan)
    yield _fit("in the loss", [*resident, activations], gpu_gib, plan)


def _fit(name: str, parts: list[Part], gpu_gib: float, plan: memory_plans.MemoryPlan) -> Finding:
    """Return whether the GPU has room for a phase of a step that holds `parts` at once."""
    size_gib = sum(part.num_bytes for part in parts) / GIB
    if size_gib <= gpu_gib and plan.has_room:
        return _ok(name, f"{size_gib:.2f} GiB, {gpu_gib - size_gib:.1f} GiB left")
    text = f"{size_gib:.2f} GiB, does not fit: docs/tasks/one_gpu.md"
    return Finding(Level.BAD, name, text)


def _activations(model: PreTrainedModel, loss_tokens: int) -> Part:
    """Estimate the bytes that a loss with checkpointed layers saves for backward, in bfloat16."""
    config = model.config.get_text_config(decoder=True)
    intermediate_size = getattr(config, "intermediate_size", None)
    if not intermediate_size:
        intermediate_size = USUAL_INTERMEDIATE * config.hidden_size
    inputs_of_layers = config.num_hidden_layers * config.hidden_size
    # The backward pass recomputes one layer at a time, and needs all of that layer.
    one_layer = SAVED_HIDDEN * config.hidden_size + SAVED_INTERMEDIATE * intermediate_size
    num_elements = loss_tokens * (inputs_of_layers + one_layer)
    note = f"{loss_tokens:,} tokens, an estimate"
    return Part("activations", num_elements * torch.bfloat16.itemsize, note)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedBytes:
    """Bytes of a model's weights, and of AdamW's states for all of them or for adapters."""

    weight_dtype: torch.dtype
    lora_rank: int
    """0: all weights are trained."""
    num_weights: int
    num_adapters: int
    """Elements of the adapters."""
    num_trained: int
    weights: int
    """Bytes, like all fields below."""
    adapters: int
    gradients: int
    optimizer_states: int

    @property
    def compute_dtype(self) -> torch.dtype:
        if self.weight_dtype == torch.float32:
            return torch.bfloat16
        return self.weight_dtype


def _trained_bytes(
    model: PreTrainedModel, lora_rank: int, weight_dtype: torch.dtype
) -> _TrainedBytes:
    head = model.get_output_embeddings()
    num_adapters = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            num_adapters += lora_rank * (module.in_features + module.out_features)
    num_weights = model.num_parameters()
    weights = num_weights * weight_dtype.itemsize
    adapters = num_adapters * torch.float32.itemsize
    num_trained = num_weights
    gradients = weights
    if lora_rank:
        num_trained = num_adapters
        gradients = adapters
    return _TrainedBytes(
        weight_dtype=weight_dtype,
        lora_rank=lora_rank,
        num_weights=num_weights,
        num_adapters=num_adapters,
        num_trained=num_trained,
        weights=weights,
        adapters=adapters,
        gradients=gradients,
        optimizer_states=optimizer_state_bytes("adamw", {}, num_trained, gradients),
    )


def _gpu_plan(
    model: PreTrainedModel,
    layout: CacheLayout,
    gpu_gib: float,
    trained: _TrainedBytes,
    percent: float,
) -> tuple[list[Part], memory_plans.MemoryPlan]:
    """Return what a GPU holds during a whole step, and the plan of the cache.

    Args:
        model: a model without values.
        layout: what the model's layers keep for each token and each sequence.
        gpu_gib: the GPU's memory, in GiB.
        trained: the weights, and what training keeps for them.
        percent: the cache's share of the memory that training leaves, from 0 to 1.
    """
    compute_dtype = trained.compute_dtype
    free = int((gpu_gib - DRIVER_GIB) * GIB) - trained.weights - trained.adapters
    copy = _copy_bytes(trained, free)
    cuda = torch.device("cuda")
    num_heads = hf_compat.num_query_heads(model)
    history_factor = MAX_GATHER_RATIO
    if layout.is_recurrent:
        history_factor = 1
    plan = memory_plans.create_memory_plan(
        memory_plans.MemoryModel(
            total_bytes=max(0, free - copy),
            free_bytes=max(0, free - copy),
            training=memory_plans.TrainingBytes(
                gradients_to_come=trained.gradients,
                optimizer_states_to_come=trained.optimizer_states,
            ),
            max_memory_percent=percent,
            block_size=RolloutConfig.block_size,
            max_requests=devices.max_requests_per_batch(cuda),
            max_batch_tokens=devices.max_batch_tokens(cuda),
            bytes_per_token=layout.bytes_per_token,
            bytes_per_sequence=layout.bytes_per_sequence,
            workspace_bytes_per_request=workspace_bytes_per_request(hf_compat.vocab_size(model)),
            gathered_bytes_per_token=gathered_bytes_per_token(layout, num_heads, compute_dtype),
            history_factor=history_factor,
            max_sequence_tokens=hf_compat.max_positions(model),
        )
    )
    of_weights = f"{trained.num_weights:,} in {trained.weight_dtype}"
    of_adapters = f"{trained.num_adapters:,} in float32, rank {trained.lora_rank}"
    of_trained = f"of {trained.num_trained:,}"
    of_copy = str(compute_dtype)
    if trained.lora_rank:
        of_copy = f"{compute_dtype}, adapters merged"
    resident = [
        Part("driver and libraries", DRIVER_GIB * GIB, "assumed"),
        Part("weights", trained.weights, of_weights),
        Part("adapters", trained.adapters, of_adapters),
        Part("gradients", trained.gradients, of_trained),
        Part("AdamW states", trained.optimizer_states, of_trained),
        Part("engine's copy", copy, of_copy),
    ]
    return resident, plan


def _copy_bytes(trained: _TrainedBytes, free: int) -> int:
    """Return the bytes of the engine's copy of the weights, as `cb_rollout.weights` decides."""
    copy = trained.num_weights * trained.compute_dtype.itemsize
    if trained.weight_dtype != trained.compute_dtype:
        return copy
    # A copy that only merges adapters must leave room.
    left = free - trained.gradients - trained.optimizer_states
    if trained.lora_rank > 0 and devices.FREE_PER_COPY * copy <= left:
        return copy
    return 0


def _cache_parts(plan: memory_plans.MemoryPlan) -> list[Part]:
    """Return what a rollout holds in addition to what stays for the whole step."""
    num_tokens = plan.num_blocks * plan.block_size
    of_cache = f"{num_tokens:,} tokens of {plan.bytes_per_token:,} B"
    return [
        Part("forward workspace", plan.forward_bytes, f"{plan.max_requests} rows of logits; keys"),
        Part("states of sequences", plan.state_bytes, f"{plan.num_slots:,} sequences"),
        Part("KV cache at most", plan.kv_bytes, of_cache),
    ]
