"""Inject faults into rollouts, audit them, and count which cause comes first.

python scripts/measure/audit.py                                    # tiny models: minutes
python scripts/measure/audit.py --real                             # SmolLM2-135M-Instruct too
python scripts/measure/audit.py --engine manager --families --real # another engine, SmolLM2 alone
python scripts/measure/audit.py --engine images                    # tiny models that read images
python scripts/measure/audit.py --clean 100 --engine ours          # rollouts without a fault

Writes `docs/benchmarks/audit_cpu.json`, where rows of other calls stay; then run
`python scripts/write_docs.py`. The faulty engine is a plain loop over `model(...)` with a
`DynamicCache`; it shares no code with the auditor. Other engines are transformers' manager, vLLM in
the environment of `CB_ROLLOUT_VLLM_PYTHON`, and, without a fault, this package's.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness.records import describe_machine
from benchmarks.peers.audited import transformers_manager, vllm
from cb_rollout import GenerationOutput, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.compat.multimodal import placeholder_token_ids
from cb_rollout.rollout.audit.auditor import audit
from cb_rollout.rollout.audit.report import Cause
from cb_rollout.rollout.prompts import encoded

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"

NUM_NEW = 24

# Of a rollout without a fault: enough to tell causes apart, and quick.
NUM_CLEAN_PROMPTS, NUM_CLEAN_NEW = 3, 16

Model = Any
Logits = torch.Tensor


@dataclass(frozen=True)
class Engine:
    """An engine, with at most one fault."""

    model: Model
    """The weights that it runs."""
    temperature: float = 1.0
    draws: Callable[[Logits, list[int]], Logits] = lambda logits, ids: logits
    """Changes the logits of one token, at temperature 1, before the draw."""
    reports: Callable[[Logits, list[int]], Logits] = lambda logits, ids: logits
    """Changes the logits that the log-probability is taken from."""
    rounds: Callable[[torch.Tensor], torch.Tensor] = lambda logprob: logprob
    shift: int = 0
    """Added to positions of completions."""
    offset: Callable[[int, int], int] = lambda length, longest: 0
    """Added to all positions of a row."""
    edit: Callable[[list[int], int], list[int]] = lambda prompt, longest: prompt
    """Changes the prompt that the engine reads."""
    old: Model = None
    """Weights of the first tokens' keys; None: the engine's own."""
    keeps: Callable[[int], int] = lambda length: 0
    """Number of leading prompt tokens with keys of the old weights."""
    updated_after: int | None = None
    """Completion tokens that the old weights sample; None: none."""
    recomputes: bool = False
    """True: keys are computed again after that."""
    rotation: int = 0
    """Places by which each number stands behind its token."""
    reread: Callable[[list[int]], list[int]] = lambda tokens: tokens
    """Changes the sampled tokens on their way to the trainer."""

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_new: int = NUM_NEW, seed: int = 0
    ) -> list[GenerationOutput]:
        """Return a completion of each prompt."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(map(len, prompts))
        return [
            self._sample(f"r{number}", list(prompt), num_new, longest, generator)
            for number, prompt in enumerate(prompts)
        ]

    def _sample(
        self, name: str, prompt: list[int], num_new: int, longest: int, generator: torch.Generator
    ) -> GenerationOutput:
        read = self.edit(prompt, longest)
        offset = self.offset(len(prompt), longest)
        cache, num_run = None, 0
        ids, tokens, logprobs = list(read), [], []
        for step in range(num_new):
            is_old = self.updated_after is not None and step < self.updated_after
            if step == self.updated_after and self.recomputes:
                cache, num_run = None, 0
            parts = [(self.old if is_old else self.model, ids[num_run:])]
            num_kept = self.keeps(len(read))
            if not step and num_kept:
                parts = [(self.old, read[:num_kept]), (self.model, read[num_kept:])]
            for model, part in parts:
                output = self._run(model, part, num_run, len(read), offset, cache)
                cache, num_run = output.past_key_values, num_run + len(part)
            logits = output.logits[0, -1].float()
            drawn = (self.draws(logits, ids) / self.temperature).softmax(-1)
            token = int(torch.multinomial(drawn, 1, generator=generator))
            reported = self.reports(logits, ids)
            logprobs.append(float(self.rounds(reported.log_softmax(-1)[token])))
            tokens.append(token)
            ids.append(token)
        logprobs = logprobs[-self.rotation :] + logprobs[: -self.rotation]
        tokens = self.reread(tokens)
        return GenerationOutput(name, prompt, tokens, logprobs, temperature=self.temperature)

    def _run(
        self, model: Model, part: list[int], num_run: int, num_prompt: int, offset: int, cache: Any
    ) -> Any:
        positions = torch.arange(num_run, num_run + len(part)) + offset
        positions[positions >= num_prompt + offset] += self.shift
        moved = {"position_ids": positions[None]} if self.shift or offset else {}
        ids = torch.tensor([part])
        return model(input_ids=ids, past_key_values=cache, use_cache=True, **moved)


@dataclass(frozen=True)
class Setting:
    """A trainer's model with everything that faults are made of."""

    name: str
    model: Model
    """The trainer's, with a LoRA adapter."""
    base: Model
    """Without the adapter."""
    old: Model
    """Before some updates."""
    stale: Model
    """Before them in one layer alone."""
    doubled: Model
    """With the adapter merged, and beside it once more."""
    prompts: list[list[int]]
    special: set[int]
    bos: int
    pad: int
    targets: Sequence[str]
    """Layers that the adapter changes."""
    tokenizer: Any = None
    other_tokenizer: Any = None
    """Another one for words of the same text; None: there is none."""

    @property
    def is_short(self) -> bool:
        return next(self.model.parameters()).dtype != torch.float32


def nudged(model: Model, share: float) -> Model:
    """Return a copy whose base matrices differ by a share of their own spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for name, p in other.named_parameters():
        if p.dim() > 1 and ".lora_" not in name:
            noise = torch.randn(p.shape, generator=generator)
            p.data = (p.data.float() + share * p.data.float().std() * noise).to(p.dtype)
    return other


def setting(
    name: str, base: Model, targets: list[str], last: str, share: float, **others: Any
) -> Setting:
    """Make an adapted model, its older versions and its faulty copies."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out="gpt2" in name)
    model = get_peft_model(copy.deepcopy(base), config).eval()
    model.to(next(base.parameters()).dtype)
    generator = torch.Generator().manual_seed(2)
    size = share * next(base.parameters()).float().std()
    for parameter_name, p in model.named_parameters():
        if ".lora_B." in parameter_name:
            p.data = (size * torch.randn(p.shape, generator=generator)).to(p.dtype)
    model.add_adapter("other", config)
    for p in (p for n, p in model.named_parameters() if ".lora_B.other." in n):
        p.data = torch.randn(p.shape, generator=generator).mul(size).to(p.dtype)
    model.set_adapter("default")
    doubled = copy.deepcopy(model)
    for module in doubled.modules():
        if hasattr(module, "get_delta_weight"):
            module.base_layer.weight.data += module.get_delta_weight("default")
    old, stale = nudged(model, share / 10), copy.deepcopy(model)
    layer = {name: p for name, p in old.state_dict().items() if last in name}
    stale.load_state_dict(layer, strict=False)
    return Setting(name, model, base, old, stale, doubled, targets=targets, **others)


def engines(s: Setting) -> Iterator[tuple[str, Cause, Engine, dict[str, Any]]]:
    """Yield each fault: its name, its cause, the engine that has it, arguments of the audit."""
    own, versions = Engine(s.model), {"versions": {"old": s.old.state_dict()}}
    half = NUM_NEW // 2
    yield "none", Cause.ROUNDING, own, versions
    yield "none, temperature 0.7", Cause.ROUNDING, scaled(s, 0.7), versions
    yield (
        "numbers of four decimals",
        Cause.ROUNDING,
        replace(own, rounds=lambda x: x.double().mul(1e4).round() / 1e4),
        versions,
    )
    yield "older version", Cause.OLDER_VERSION, Engine(s.old), versions
    yield (
        "prompt keys of it",
        Cause.STALE_PROMPT_KEYS,
        replace(own, old=s.old, keeps=lambda n: n - 1),
        versions,
    )
    yield (
        "its keys in blocks of 16",
        Cause.STALE_PROMPT_KEYS,
        replace(own, old=s.old, keeps=lambda n: (n - 1) // 16 * 16),
        versions,
    )
    midway = replace(own, old=s.old, updated_after=half)
    yield "update in flight, old keys", Cause.OLD_KEYS_KEPT, midway, versions
    yield "update in flight, new keys", Cause.UPDATED, replace(midway, recomputes=True), versions
    yield "one layer not updated", Cause.STALE_LAYER, Engine(s.stale), versions
    yield "adapter not loaded", Cause.NO_ADAPTER, Engine(s.base), versions
    yield "adapter twice", Cause.ADAPTER_TWICE, Engine(s.doubled), versions
    other = copy.deepcopy(s.model)
    other.set_adapter("other")
    yield "another adapter", Cause.OTHER_ADAPTER, Engine(other), versions
    yield from readouts(s, versions)
    yield from prompts(s, versions)
    for name, rounded in (("int8", in_int8), ("float8", in_float8)):
        yield f"{name} weights", Cause.QUANTISED, Engine(quantised(s.model, rounded)), versions
    yield from pairs(s, versions)
    if not s.is_short:
        yield from precisions(s, versions)


def in_int8(rows: torch.Tensor) -> torch.Tensor:
    """Round each row, the weights of an output, to 255 values of its own."""
    scale = 127 / rows.abs().max(-1, keepdim=True).values
    return torch.round(rows * scale) / scale


def in_float8(rows: torch.Tensor) -> torch.Tensor:
    """Round all weights to floats of four exponent and three mantissa bits, with one scale."""
    scale = 448 / rows.abs().max()
    return (rows * scale).to(torch.float8_e4m3fn).to(rows.dtype) / scale


def quantised(model: Model, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """Return a copy whose layers, but not its embeddings and head, have rounded matrices."""
    other = copy.deepcopy(model)
    for name, p in other.named_parameters():
        is_matrix = p.dim() == 2 and ".weight" in name
        if is_matrix and not any(
            x in name for x in (".lora_", "embed", "wte", "wpe", "head", ".gate.")
        ):
            # GPT-2 holds its matrices transposed.
            turned = "c_" in name
            rows = (p.data.T if turned else p.data).float()
            new = rounded(rows)
            p.data = (new.T if turned else new).contiguous().to(p.dtype)
    return other


def pairs(s: Setting, versions: dict[str, Any]) -> Iterator[Any]:
    """Yield two faults at once, which no single cause explains."""
    raw = {"temperature": 0.7}
    yield "older version, temperature not in the numbers", None, Engine(s.old, **raw), versions
    yield (
        "adapter not loaded, numbers of top_k",
        None,
        Engine(s.base, draws=partial(cut, top_k=20), reports=partial(cut, top_k=20)),
        versions,
    )
    warm = Engine(s.doubled, reports=lambda logits, ids: logits / 0.9)
    yield "adapter twice, numbers of temperature 0.9", None, warm, versions


def precisions(s: Setting, versions: dict[str, Any]) -> Iterator[Any]:
    """Yield faults that round to 16 bits what the trainer computes in float32."""
    own, short = Engine(s.model), Engine(copy.deepcopy(s.model).bfloat16())
    yield "model in bfloat16", Cause.MODEL_16BIT, short, versions
    for dtype in (torch.bfloat16, torch.float16):
        rounded = replace(own, reports=lambda x, _, dtype=dtype: x.to(dtype).float())
        yield f"logits in {str(dtype)[6:]}", Cause.LOGITS_16BIT, rounded, versions
    head = copy.deepcopy(s.model)
    layer = head.get_output_embeddings()
    weight = layer.weight.bfloat16()
    layer.forward = lambda hidden: torch.nn.functional.linear(hidden.bfloat16(), weight)
    yield "head in bfloat16", Cause.HEAD_16BIT, Engine(head), versions
    merged = copy.deepcopy(s.model).merge_and_unload()
    for name, p in merged.named_parameters():
        if any(target in name for target in s.targets):
            p.data = p.data.bfloat16().float()
    yield "adapter merged in bfloat16", Cause.ADAPTER_MERGED, Engine(merged), versions


def scaled(s: Setting, temperature: float, applied: float | None = None) -> Engine:
    """Return an engine that samples at one temperature and reports at another."""
    divisor = temperature if applied is None else applied
    return Engine(s.model, temperature, reports=lambda logits, ids: logits / divisor)


def cut(
    logits: Logits, ids: list[int], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Logits:
    """Return logits without the tokens that truncation excludes."""
    values, order = logits.sort(descending=True)
    p = values.softmax(-1)
    keep = (p.cumsum(-1) - p < top_p) & (p >= min_p * p[0])
    # Equal logits stay or go together, as in transformers.
    keep &= values >= values[(top_k or len(p)) - 1]
    return torch.full_like(logits, -torch.inf).scatter(0, order[keep], values[keep])


def repeated(logits: Logits, ids: list[int], penalty: float) -> Logits:
    """Return logits with a repetition penalty."""
    index = torch.tensor(sorted(set(ids)))
    logits, own = logits.clone(), logits[index]
    logits[index] = torch.where(own > 0, own / penalty, own * penalty)
    return logits


def readouts(s: Setting, versions: dict[str, Any]) -> Iterator[Any]:
    """Yield faults of the reported numbers alone."""
    yield "temperature not in the numbers", Cause.TEMPERATURE, scaled(s, 0.7, 1.0), versions
    yield "numbers of temperature 0.9", Cause.TEMPERATURE, scaled(s, 1.0, 0.9), versions
    for name, cause, value in (
        ("top_k", Cause.TOP_K, 20),
        ("top_p", Cause.TOP_P, 0.9),
        ("min_p", Cause.MIN_P, 0.2),
    ):
        change = partial(cut, **{name: value})
        engine = Engine(s.model, draws=change, reports=change)
        yield f"{name} in the numbers", cause, engine, versions
        known = {**versions, "sampling_params": SamplingParams(**{name: value})}
        yield f"{name} in the numbers, known", cause, engine, known

    def penalised(x: Logits, ids: list[int]) -> Logits:
        return repeated(x, ids, 1.2)

    engine = Engine(s.model, draws=penalised, reports=penalised)
    yield "repetition penalty in the numbers", Cause.PENALTIES, engine, versions
    short = Engine(s.model, rounds=lambda x: x.bfloat16())
    yield "log-probabilities in bfloat16", Cause.LOGPROBS_16BIT, short, versions
    turned = Engine(s.model, rotation=1)
    yield "numbers one token late", Cause.NEIGHBOUR, turned, versions
    raw = Engine(s.model, draws=partial(cut, top_p=0.9))
    known = {"sampling_params": SamplingParams(top_p=0.9), "logprobs_mode": "processed"}
    yield "top_p claimed and not in the numbers", Cause.TOP_P, raw, {**versions, **known}


def encoded_again(tokenizer: Any, prompt: list[int], longest: int) -> list[int]:
    """Return the tokens of the prompt's text."""
    return tokenizer(text=tokenizer.decode(prompt), add_special_tokens=False)["input_ids"]


def rendered_again(tokenizer: Any, prompt: list[int], longest: int) -> list[int]:
    """Return the tokens of a chat in which the prompt's text is what the user says."""
    chat = [{"role": "user", "content": tokenizer.decode(prompt)}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text=text, add_special_tokens=False)["input_ids"]


def prompts(s: Setting, versions: dict[str, Any]) -> Iterator[Any]:
    """Yield faults of prompts and positions."""
    with_tokenizer = {**versions, "tokenizer": s.tokenizer}
    own = Engine(s.model)
    yield "BOS twice", Cause.BOS_TWICE, replace(own, edit=lambda p, _: [s.bos, *p]), with_tokenizer
    yield "BOS missing", Cause.BOS_MISSING, replace(own, edit=lambda p, _: p[1:]), with_tokenizer
    yield (
        "special tokens dropped",
        Cause.SPECIAL_TOKENS_DROPPED,
        replace(own, edit=lambda p, _: [t for t in p if t not in s.special]),
        with_tokenizer,
    )
    yield (
        "padding attended to",
        Cause.PADDING_ATTENDED,
        replace(own, edit=lambda p, longest: [s.pad] * (longest - len(p)) + p),
        with_tokenizer,
    )
    twice = replace(own, edit=partial(rendered_again, s.tokenizer))
    yield "chat template twice", Cause.TEMPLATE_TWICE, twice, with_tokenizer
    if s.other_tokenizer is not None:
        yield from other_tokenizers(s, with_tokenizer)
    rope = s.model.config.rope_parameters if "llama" in s.name else {}
    if rope.get("rope_type") == "longrope":
        long = copy.deepcopy(s.model)
        # Every prompt is longer.
        long.config.rope_parameters["original_max_position_embeddings"] = 1
        yield "RoPE of long sequences", Cause.ROPE, Engine(long), versions
    yield "positions of completions off by one", Cause.POSITIONS, replace(own, shift=1), versions
    if s.name.startswith("gpt2"):
        yield (
            "padding counted in positions",
            Cause.POSITIONS,
            replace(own, offset=lambda n, longest: longest - n),
            versions,
        )


def other_tokenizers(s: Setting, arguments: dict[str, Any]) -> Iterator[Any]:
    """Yield an engine whose tokenizer has one token more, so that later ids are shifted."""
    own, other = s.tokenizer, s.other_tokenizer
    (added,) = {*other.get_vocab()} - {*own.get_vocab()}
    added_id = other.convert_tokens_to_ids(added)
    arguments = {**arguments, "tokenizers": {"revision 2": other}}

    def read_by(tokenizer: Any, ids: list[int], by: Any) -> list[int]:
        return by(text=tokenizer.decode(ids), add_special_tokens=False)["input_ids"]

    def without_added(logits: Logits, ids: list[int]) -> Logits:
        # The trainer's tokenizer has no token for its text.
        return logits.index_fill(0, torch.tensor([added_id]), -torch.inf)

    shifted = Engine(s.model, edit=lambda prompt, _: read_by(own, prompt, other))
    yield "another tokenizer", Cause.OTHER_TOKENIZER, shifted, arguments
    text = replace(shifted, draws=without_added, reread=lambda ids: read_by(other, ids, own))
    yield "another tokenizer, completions as text", Cause.OTHER_TOKENIZER, text, arguments


# Like a default RoPE up to 256 positions, which no sequence here reaches.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "attention_factor": 1.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + number / 4 for number in range(8)],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "rope_parameters": LONGROPE},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
TARGETS = {"gpt2": ["c_attn"]}
LAST = {"gpt2": ".h.2."}

# Multiplies fresh weights, whose outputs are near uniform.
SHARPNESS = 3.0


def tiny_tokenizer(*added: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of words, one for each id below 256; the first four are special.

    Words that are added come after those, and take the place of the last ones.
    """
    words = ["<pad>", "<eos>", "<bos>", "<turn>", *added, *(f"w{n}" for n in range(4, 256))][:256]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    backend.pre_tokenizer = WhitespaceSplit()
    # Another spelling of a word: ids do not survive text.
    backend.normalizer = Replace("w255", "w254")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=words[0],
        eos_token=words[1],
        bos_token=words[2],
        additional_special_tokens=words[3:4],
        chat_template="{% for m in messages %}<turn> {{ m.content }} <turn> {% endfor %}",
    )


def tiny_setting(family: str, dtype: torch.dtype) -> Setting:
    """Make a tiny random model of a family."""
    config = AutoConfig.for_model(
        family,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    for p in base.parameters():
        if p.dim() > 1:
            p.data *= SHARPNESS
    draw = torch.Generator().manual_seed(3)
    prompts = [
        [2, 3, *torch.randint(4, 256, (n,), generator=draw).tolist(), 255, 9, 3]
        for n in (9, 17, 21, 30, 33, 40)
    ]
    return setting(
        family,
        base.to(dtype).eval(),
        TARGETS.get(family, ["q_proj", "v_proj"]),
        LAST.get(family, ".layers.2."),
        0.3,
        prompts=prompts,
        special={0, 1, 2, 3},
        bos=2,
        pad=0,
        tokenizer=tiny_tokenizer(),
        other_tokenizer=tiny_tokenizer("added"),
    )


def real_setting(dtype: torch.dtype) -> Setting:
    """Load SmolLM2-135M-Instruct and chats."""
    from measure.agreement import chats
    from smollm2 import smollm2_folder

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Letters one by one: ids that do not survive text.
    spelled = [i for letter in " please" for i in tokenizer(text=letter)["input_ids"]]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return setting(
        "smollm2",
        base,
        ["q_proj", "v_proj"],
        ".layers.20.",
        0.3,
        prompts=[
            [tokenizer.bos_token_id, *chat[:-3], *spelled, *chat[-3:]]
            for chat in chats(tokenizer, 2)
        ],
        special=set(tokenizer.all_special_ids),
        bos=tokenizer.bos_token_id,
        pad=tokenizer.pad_token_id,
        tokenizer=tokenizer,
    )


Fault = tuple[str, Cause | None, Callable[[], list[GenerationOutput]], dict[str, Any]]


def loop_faults(s: Setting) -> Iterator[Fault]:
    """Yield the faults of the plain loop."""
    for name, cause, engine, arguments in engines(s):
        yield name, cause, partial(engine.sample, s.prompts, NUM_NEW), arguments


def manager_faults(s: Setting) -> Iterator[Fault]:
    """Yield faults of transformers' manager, its stale prefixes among them."""
    versions = {"versions": {"old": s.old.state_dict()}}

    def sample(model: Model, **sampling: Any) -> list[GenerationOutput]:
        with transformers_manager(model, s.prompts, NUM_NEW, **sampling) as sampled:
            return sampled()

    def after_update() -> list[GenerationOutput]:
        model = copy.deepcopy(s.old)
        with transformers_manager(model, s.prompts, NUM_NEW) as sampled:
            sampled()
            model.load_state_dict(s.model.state_dict())
            return sampled(seed=1)

    yield "none", Cause.ROUNDING, partial(sample, s.model), versions
    cooler = partial(sample, s.model, temperature=0.7)
    yield "none, temperature 0.7", Cause.ROUNDING, cooler, versions
    yield "older version", Cause.OLDER_VERSION, partial(sample, s.old), versions
    yield "prefixes kept after an update", Cause.STALE_PROMPT_KEYS, after_update, versions
    yield "adapter not loaded", Cause.NO_ADAPTER, partial(sample, s.base), versions
    truncated = partial(sample, s.model, top_p=0.9)
    yield "top_p in the numbers", Cause.TOP_P, truncated, versions


def vllm_faults(s: Setting) -> Iterator[Fault]:
    """Yield faults of vLLM, which runs merged weights and starts for each of them."""
    versions = {"versions": {"old": s.old.state_dict()}}
    merged, older = (copy.deepcopy(model).merge_and_unload() for model in (s.model, s.old))
    known = {**versions, "sampling_params": SamplingParams(top_p=0.9)}
    with vllm(merged, s.prompts, NUM_NEW, logprobs_mode="processed_logprobs") as sample:
        yield "none", Cause.ROUNDING, partial(sample, seed=0), versions
        yield "none, temperature 0.7", Cause.ROUNDING, partial(sample, 0.7, seed=0), versions
        yield "top_p in the numbers", Cause.TOP_P, partial(sample, top_p=0.9, seed=0), versions
    with vllm(merged, s.prompts, NUM_NEW, logprobs_mode="raw_logprobs") as sample:
        yield "none, top_p known", Cause.ROUNDING, partial(sample, top_p=0.9, seed=0), known
        cooler = partial(sample, 0.7, seed=0)
        yield "temperature not in the numbers", Cause.TEMPERATURE, cooler, versions
    with vllm(older, s.prompts, NUM_NEW) as sample:
        yield "older version", Cause.OLDER_VERSION, partial(sample, seed=0), versions
    with vllm(s.base, s.prompts, NUM_NEW) as sample:
        yield "adapter not loaded", Cause.NO_ADAPTER, partial(sample, seed=0), versions


@dataclass(frozen=True)
class VisionSetting:
    """A model that reads images, and prompts of one picture each, twice."""

    name: str
    model: Model
    old: Model
    """Before some updates."""
    processor: Any
    chats: list[list[dict[str, Any]]]
    prompts: list[GenerationOutput]
    """Prompts with their images, as an engine of this package returns them."""
    tensors: list[list[dict[str, torch.Tensor]]]
    """Results of the processor for each prompt, with each picture in place of its own."""

    def sample(
        self,
        num_new: int = NUM_NEW,
        seed: int = 0,
        model: Model = None,
        pictures: Sequence[int] | None = None,
        is_ignored: bool = False,
        without: frozenset[int] = frozenset(),
    ) -> list[GenerationOutput]:
        """Return completions by plain forwards of transformers.

        `pictures` are read in place of 0, 1, ...; if they are ignored, the forward has the ids
        alone, but for those `without` which the prompt is read.
        """
        generator = torch.Generator().manual_seed(seed)
        order = range(len(self.tensors)) if pictures is None else pictures
        # A sampled one would stand for a part of an image.
        placeholders = [*placeholder_token_ids(self.model)]
        outputs = []
        for number, prompt in enumerate(self.prompts):
            number = number // 2
            tensors = dict(self.tensors[number][order[number]])
            if is_ignored:
                ids = [t for t in tensors["input_ids"][0].tolist() if t not in without]
                tensors = {"input_ids": torch.tensor([ids])}
            tokens, logprobs = [], []
            for _ in range(num_new):
                logits = self._logits(model or self.model, tensors, [*tokens, 0])
                drawn = logits.softmax(-1).index_fill(0, torch.tensor(placeholders), 0)
                token = int(torch.multinomial(drawn, 1, generator=generator))
                logprobs.append(float(logits.log_softmax(-1)[token]))
                tokens.append(token)
            outputs.append(replace(prompt, generated_tokens=tokens, logprobs=logprobs))
        return outputs

    @staticmethod
    def _logits(model: Model, tensors: dict[str, torch.Tensor], tokens: list[int]) -> Logits:
        from tiny_vision import plain_logits

        return plain_logits(model, tensors, tokens)[-1].float()


def vision_setting(family: str, dtype: torch.dtype) -> VisionSetting:
    """Make a tiny random model that reads images."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from tiny_vision import picture, tiny_vision_model

    model, processor = tiny_vision_model(family)
    model = model.to(dtype)
    # Two of one size and two of others, which may take another number of tokens.
    pictures = [picture(1), picture(2), picture(3, (64, 24)), picture(4, (30, 60))]

    def chat(number: int, image: Any) -> list[dict[str, Any]]:
        text = " ".join(f"w{20 + (7 * number + n) % 120}" for n in range(4 + number))
        parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        return [{"role": "w30", "content": parts}]

    def processed(messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )

    numbers, placeholders = range(len(pictures)), placeholder_token_ids(model)
    chats = [chat(number, pictures[number]) for number in numbers]
    prompts = [
        GenerationOutput(f"r{number}.{sample}", own.token_ids, images=own.images(placeholders))
        for number, own in enumerate(encoded(chats, processor))
        for sample in range(2)
    ]
    tensors = [[processed(chat(number, image)) for image in pictures] for number in numbers]
    return VisionSetting(family, model, nudged(model, 0.03), processor, chats, prompts, tensors)


def image_faults(s: VisionSetting) -> Iterator[Fault]:
    """Yield faults of images, and some that rollouts without images have too."""
    versions = {"versions": {"old": s.old.state_dict()}}
    yield "none", Cause.ROUNDING, s.sample, versions
    ignored = partial(s.sample, is_ignored=True)
    yield "images ignored", Cause.IMAGES_IGNORED, ignored, versions
    left_out = partial(ignored, without=placeholder_token_ids(s.model))
    yield "images and their tokens left out", Cause.IMAGES_IGNORED, left_out, versions
    for name, pictures in (
        ("images of the next prompt", (1, 2, 3, 0)),
        ("images of two prompts exchanged", (1, 0, 2, 3)),
        ("images in disorder", (2, 0, 3, 1)),
        ("the first image for all", (0, 0, 0, 0)),
    ):
        exchanged = partial(s.sample, pictures=pictures)
        yield name, Cause.IMAGES_EXCHANGED, exchanged, versions
    yield "older version", Cause.OLDER_VERSION, partial(s.sample, model=s.old), versions


FAULTS_OF: dict[str, Callable[[Any], Iterator[Fault]]] = {
    "loop": loop_faults,
    "manager": manager_faults,
    "vllm": vllm_faults,
    "images": image_faults,
}

VISION_FAMILIES = ("qwen2_5_vl", "gemma3", "llava")


def run(s: Any, engine: str, numbers: slice) -> list[dict[str, Any]]:
    """Return, for each fault of an engine, what the audit says."""
    rows, bounds = [], range(1000)[numbers]
    for number, (name, cause, sample, arguments) in enumerate(FAULTS_OF[engine](s)):
        if number not in bounds:
            continue
        started = time.perf_counter()
        outputs = sample()
        sampled = time.perf_counter()
        report = audit(outputs, s.model, **arguments)
        first = report.evidence[0]
        rows.append(
            {
                "engine": engine,
                "model": s.name,
                "dtype": str(next(s.model.parameters()).dtype).removeprefix("torch."),
                "fault": name,
                "expected": said(cause),
                "found": said(report.cause),
                "first": first.cause.value,
                "detail": first.detail,
                "nats_per_token": round(first.nats_per_token, 3),
                "is_clean": bool(report),
                "seconds": [round(sampled - started, 2), round(time.perf_counter() - sampled, 2)],
            }
        )
        if report.cause is not cause:
            print(report, flush=True)
        print({k: rows[-1][k] for k in list(rows[-1])[:9]} | {"s": rows[-1]["seconds"]}, flush=True)
    return rows


def said(cause: Cause | None) -> str:
    """Return the name of a cause, or that none explains the numbers."""
    return cause.value if cause else "unexplained"


def clean_rollouts(
    s: Any, engine: str, num_rollouts: int, first_seed: int
) -> Iterator[list[GenerationOutput]]:
    """Yield rollouts of an engine without a fault, of a few short prompts.

    Those of images are of this package.
    """
    is_vision, num_new = engine == "images", NUM_CLEAN_NEW
    prompts = (s.chats if is_vision else s.prompts)[:NUM_CLEAN_PROMPTS]
    seeds = range(first_seed, first_seed + num_rollouts)
    if engine == "loop":
        yield from (Engine(s.model).sample(prompts, num_new, seed) for seed in seeds)
    elif engine == "manager":
        with transformers_manager(s.model, prompts, num_new) as sample:
            rollouts = [sample(seed) for seed in seeds]
        yield from rollouts
    elif engine == "vllm":
        with vllm(copy.deepcopy(s.model).merge_and_unload(), prompts, num_new) as sample:
            yield from (sample(seed=seed) for seed in seeds)
    else:
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        config, processor = RolloutConfig(seed=first_seed), s.processor if is_vision else None
        with RolloutGenerator(s.model, config, tokenizer=processor) as generator:
            for _ in seeds:
                outputs = generator.generate_batch(prompts, sampling_params=params)
                yield list(outputs.values())


def clean_alarms(s: Any, engine: str, num_rollouts: int, first_seed: int) -> dict[str, Any]:
    """Return the number of alarms in rollouts without a fault."""
    alarms, num = 0, 0
    for outputs in clean_rollouts(s, engine, num_rollouts, first_seed):
        report = audit(outputs, s.model, versions={"old": s.old.state_dict()})
        num += 1
        if not report:
            alarms += 1
            print(report, flush=True)
    dtype = str(next(s.model.parameters()).dtype).removeprefix("torch.")
    counted = {"engine": engine, "model": s.name, "dtype": dtype, "first_seed": first_seed}
    print(counted | {"rollouts": num, "alarms": alarms}, flush=True)
    return counted | {"rollouts": num, "alarms": alarms}


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--families", nargs="*", help="tiny models; all")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--engine", choices=[*FAULTS_OF, "ours"], default="loop")
    parser.add_argument("--faults", nargs=2, type=int, default=(0, None), help="first and end")
    parser.add_argument("--clean", type=int, default=0, help="rollouts without a fault, each")
    parser.add_argument("--first-seed", type=int, default=0, help="of those rollouts")
    parser.add_argument("--output", type=Path, default=BENCHMARKS / "audit_cpu.json")
    args = parser.parse_args()
    for dtype in (getattr(torch, name) for name in args.dtypes):
        is_vision = args.engine == "images"
        known, create = (VISION_FAMILIES, vision_setting) if is_vision else (FAMILIES, tiny_setting)
        families = known if args.families is None else args.families
        made = [create(family, dtype) for family in families]
        for own in [*made, real_setting(dtype)] if args.real else made:
            if args.clean:
                counted = clean_alarms(own, args.engine, args.clean, args.first_seed)
                write_record(args.output, clean=[counted])
            else:
                write_record(args.output, rows=run(own, args.engine, slice(*args.faults)))


def write_record(
    path: Path, rows: Sequence[dict[str, Any]] = (), clean: Sequence[dict[str, Any]] = ()
) -> None:
    """Write rows into the record, in place of those of the same names."""
    record = json.loads(path.read_text()) if path.exists() else {}
    keys = ("engine", "model", "dtype", "fault")
    known = {tuple(row[k] for k in keys): row for row in [*record.get("rows", ()), *rows]}
    keys = ("engine", "model", "dtype", "first_seed")
    counted = {tuple(row[k] for k in keys): row for row in [*record.get("clean", ()), *clean]}
    record = {
        "bench": "audit",
        **describe_machine("cpu"),
        "num_new": NUM_NEW,
        "clean": list(counted.values()),
        "rows": list(known.values()),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    right = sum(row["found"] == row["expected"] for row in known.values())
    print(f"{right} of {len(known)} right; {path}")


if __name__ == "__main__":
    main()
