"""Write the parts of the documents that come from code and measurements.

The code gives `docs/command_line.md`, `docs/compatibility.md`, `docs/configuration.md`,
`docs/sampling.md`, `docs/metrics.md` and `docs/replay.md`; the recorded runs give the tables of
`README.md` and `docs/benchmarks/README.md`.
`scripts/docs.sh` builds the site from them.

python scripts/write_docs.py            # write
python scripts/write_docs.py --check    # fail if something would change
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.table import OURS, number_text, times_better, value_text
from cb_rollout.config import compilation, reference
from cb_rollout.config import generation_fields as fields_of_generation
from cb_rollout.config.combinations import COMBINATIONS, described
from cb_rollout.config.generation_fields import COUNTERPARTS
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.tools.cli import create_parser
from pages.costs_table import COSTS
from pages.metrics_table import HISTOGRAMS, METRICS
from pages.replay_table import REPLAYS, Replay

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"

COMMAND_LINE_HEADER = """# Command line

Every command of `cb-rollout` and every option, from their help texts. `python -m cb_rollout` is
the same command.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | the command ran and found a problem |
| 2 | the command could not run, or its options are wrong; a line on stderr gives the reason |
| 130 | interrupted |

| command | exit code 1 means | `--json` prints |
|---|---|---|
| `demo` | a whole run did not learn what it should have | |
| `generate` | some sequences failed; the others are in the output | the fields of `DatasetReport` |
| `serve` | never: it ends with 0 after SIGTERM or Ctrl-C | |
| `tinker` | never: it ends with 0 after SIGTERM or Ctrl-C | |
| `bench` | never | its record is JSON |
| `report` | never | `path`, or with `--list` the `runs` |
| `watch` | never | |
| `audit` | rounding does not explain the numbers and tokens | `cause`, `sentence`, its evidence |
| `doctor` | not usable on this machine, or not with this checkpoint | `is_usable`, `findings` |
| `env` | none | versions, machine, variables |

`--json` prints one object to stdout and does not change the exit code. An error is a line on
stderr, even with `--json`.

For shell completion, run `pip install shtab`. Then
`shtab --shell=bash --prog=cb-rollout cb_rollout.tools.cli.create_parser` prints the script for
bash; zsh and fish work the same way.

`scripts/write_docs.py` writes this page.
"""

CONFIGURATION_HEADER = """# Configuration

Every field of `RolloutConfig`, from its help text. A field that cannot be honoured raises
`ConfigurationError`; no field is ignored. `scripts/write_docs.py` writes this page.

The field names of transformers' `ContinuousBatchingConfig` work too, such as `page_size` for
`block_size`. [Your own compile settings](gpu.md#your-own-compile-settings) explains how a
`CompileConfig` is used.

| field | default | meaning | cost, or when to change it |
|---|---|---|---|
"""

COMPATIBILITY_HEADER = """# What goes together

Search this page for a setting to see

- [which pairs of features are refused](#pairs-that-are-refused), by a `ConfigurationError` that
  says what to set;
- how each field of transformers' [GenerationConfig](#fields-of-transformers-generationconfig),
  [ContinuousBatchingConfig](#fields-of-transformers-continuousbatchingconfig) and
  [CompileConfig](#fields-of-transformers-compileconfig) is used, or why it is refused.

For the limits of a model type see [Architectures](architectures.md), for those of a device
[GPU](gpu.md). `scripts/write_docs.py` writes this page from `cb_rollout/config/combinations.py`,
`generation_fields.py` and `reference.py`.

## Pairs that are refused

| feature | does not go with | the error |
|---|---|---|
"""

SAMPLING_HEADER = """# Sampling

This table has every field of `SamplingParams` with its help text, and the corresponding field of
transformers' `GenerationConfig`. No field of a `GenerationConfig` is ignored: [What goes
together](compatibility.md#fields-of-transformers-generationconfig) lists which ones are read, which
are refused, and which have no effect. `scripts/write_docs.py` writes this page.

```python
params = SamplingParams(temperature=0.8, repetition_penalty=1.1, stop="\\n\\n", max_new_tokens=256)
outputs = generator.generate_batch(prompts, sampling_params=params)
```

| field | default | meaning | GenerationConfig |
|---|---|---|---|
"""

GENERATION_FIELDS_HEADER = """
## Fields of transformers' GenerationConfig

How each field of transformers 5.17 to 5.24 is used. A refused field raises a `ConfigurationError`
with the reason, unless it is None or at its neutral value. A name that transformers does not know
is refused too. A generation config may also hold the fields of the next table, as
`max_batch_tokens` in transformers' guide.

| field | here | by what, or why |
|---|---|---|
"""

BATCHING_FIELDS_HEADER = """
## Fields of transformers' ContinuousBatchingConfig

If a generation config holds such settings, in its `continuous_batching_config` or under their
names, they fill what the `RolloutConfig` leaves at its default. Two different values of one setting
are refused, and so is a call that asks for other settings than those of the running engine.

| field | here | by what, or why |
|---|---|---|
"""

COMPILE_FIELDS_HEADER = """
## Fields of transformers' CompileConfig

The fields of `decode_compile_config`, `varlen_compile_config`, and a generation config's
`compile_config`. A value that `torch.compile` does not take is refused, and so is a forward that
cannot be compiled, with the reason.

| field | here | by what, or why |
|---|---|---|
"""

SAMPLING_FOOTER = """
## Order

Parameters apply in the order of `generate`:

1. placeholders of images, videos and sounds are forbidden, unless `logit_bias` names them; then
   `logit_bias` and `sequence_bias`
2. repetition, presence and frequency penalties
3. `no_repeat_ngram_size`, `bad_words`
4. tokens that are forbidden at this position: `min_new_tokens`, `min_length`,
   `begin_suppress_tokens`
5. the forced first and last token
6. `logits_processors`
7. the grammar, which no other parameter can override
8. temperature, top-k, top-p, min-p

Greedy decoding takes the most likely token after step 7; temperature does not matter.

Two things differ from `generate`. A stop string must lie entirely in the completion; one that
begins in the prompt does not count. A stop string before `min_new_tokens` does not end the
sequence.

## Log-probabilities

- `logprobs_mode="policy"`: log-probabilities, including `top_logprobs`, come from the model's
  own distribution at this temperature, over the whole vocabulary, before any other change to the
  logits. A trainer recomputes these.
- `logprobs_mode="processed"`: they come from the distribution that is sampled, after all steps
  above.

If these two distributions differ, the policy-gradient ratio is biased, and only the processed
log-probabilities can measure the bias.

## Errors

- If a processor or a grammar raises, only its own request fails, with the reason in `error`. The
  same happens if a processor returns anything but scores, or leaves no token to sample.
- Token ids outside the vocabulary raise an error in the caller.
- An input that is too long, empty or not encodable raises an error before anything is generated;
  with `on_error="return"`, only that input fails.
- Under greedy decoding, all sequences of a prompt are equal. `generate_batch` warns about this;
  strategies and the command line refuse it.

## Grammars

`grammar` takes any object with the methods of `cb_rollout.config.grammar.Grammar`. The grammar
creates one matcher per sequence. The matcher fills a mask of the allowed next tokens, accepts the
sampled token, and says when it is done. For xgrammar, install the extra `grammar`
(`pip install 'cb_rollout[grammar]'`):

```python
from cb_rollout.integrations.xgrammar import XGrammar

grammar = XGrammar.from_json_schema(schema, tokenizer, vocab_size=model.config.vocab_size)
outputs = generator.generate_batch(prompts, sampling_params=SamplingParams(grammar=grammar))
```

### JSON schemas

Each keyword of a JSON schema is either enforced, or refused before a token is sampled: an
`InvalidRequestError` names the keyword, its path in the schema, and what to do. `strict` in the
server's `response_format` changes nothing. xgrammar alone ignores many keywords. So cb_rollout
has a list of the keywords that xgrammar 0.2.8 enforces (`cb_rollout/integrations/json_schema.py`),
and rewrites those that it enforces only in part:

- Lengths, patterns and the formats `date`, `time`, `date-time`, `email`, `hostname` and `ipv4`
  become patterns of characters that JSON does not escape. These formats are narrower than the
  standard: no leap seconds, no quoted names, years 1000 to 2999. For `duration`, `ipv6`, `uri`,
  `uri-reference`, `uri-template` and `uuid`, xgrammar's own patterns are used. Other formats are
  refused.
- A pattern must match the whole string. `^` and `$` are allowed only at its ends. Assertions are
  not allowed; the only escapes are classes, punctuation and `\\uXXXX`.
- An object has only the properties that `properties`, `patternProperties`, `propertyNames` or
  `additionalProperties` allow, in the order of the schema.
- A number with bounds has at most 6 decimals. If no such number lies between the bounds, they are
  refused.
- A keyword needs its `type`. It cannot be combined with `$ref`, `const`, `enum`, `anyOf`, `oneOf`
  or `allOf`, because xgrammar would then ignore it. `type` may be combined with `const` and `enum`.
- The branches of `oneOf` must differ in type, in their strings, or in the strings of a required
  property.
- `title`, `description`, `default`, `examples`, `deprecated`, `readOnly`, `writeOnly`,
  `$comment`, `$schema`, `$defs`, `definitions`, `discriminator`, and `$id` at the root restrict
  nothing and are accepted.

`python scripts/measure/json_schema.py` compares xgrammar alone, xgrammar as cb_rollout uses it, and
llguidance 1.9.1 on texts that obey a schema and texts that do not:

| keyword | xgrammar | cb_rollout | llguidance |
|---|---|---|---|
| type | enforced | enforced | enforced |
| const | enforced | partly refused | enforced |
| enum | enforced | enforced | enforced |
| enum beside type | enforced | enforced | enforced |
| enum beside another type | 1 of 1 wrong pass | refused | enforced |
| enum beside minLength | 1 of 1 wrong pass | refused | enforced |
| minLength, maxLength | 2 of 4 wrong pass | enforced | enforced |
| pattern | 2 of 9 wrong pass | partly refused | enforced |
| pattern with anchors inside | enforced | refused | enforced |
| pattern that looks ahead | 1 of 1 wrong pass | refused | refused |
| pattern beside minLength | 1 of 2 wrong pass | refused | enforced |
| format: date | 1 of 2 wrong pass | enforced | enforced |
| format: time | 1 of 2 wrong pass | enforced | 1 of 2 wrong pass |
| format: date-time | 1 of 2 wrong pass | enforced | enforced |
| format: duration | enforced | enforced | enforced |
| format: email | enforced | enforced | enforced |
| format: hostname | enforced | enforced | enforced |
| format: ipv4 | 1 of 3 wrong pass | enforced | enforced |
| format: ipv6 | enforced | enforced | enforced |
| format: uri | enforced | enforced | enforced |
| format: uuid | enforced | enforced | enforced |
| format: json-pointer | 1 of 2 wrong pass | refused | refused |
| format: iri | 2 of 2 wrong pass | refused | refused |
| format: regex | 2 of 2 wrong pass | refused | refused |
| format beside maxLength | 1 of 1 wrong pass | refused | enforced |
| bounds of integers | enforced | enforced | enforced |
| exclusive bounds of integers | enforced | enforced | enforced |
| bounds of numbers | enforced | enforced | enforced |
| exclusive bounds of numbers | enforced | enforced | enforced |
| a narrow range of numbers | 1 of 3 wrong pass | refused | enforced |
| multipleOf of integers | enforced | enforced | enforced |
| multipleOf beside one bound | 1 of 2 wrong pass | refused | enforced |
| multipleOf of numbers | 1 of 1 wrong pass | refused | enforced |
| items | enforced | enforced | enforced |
| minItems, maxItems | enforced | enforced | enforced |
| prefixItems | enforced | enforced | enforced |
| uniqueItems | 2 of 2 wrong pass | refused | refused |
| contains | 2 of 2 wrong pass | refused | refused |
| contains, maxContains | 1 of 1 wrong pass | refused | refused |
| unevaluatedItems | enforced | enforced | refused |
| properties | enforced | enforced | enforced |
| required | enforced | enforced | enforced |
| required without properties | 2 of 2 wrong pass | refused | enforced |
| additionalProperties: false | enforced | enforced | enforced |
| additionalProperties: {...} | enforced | enforced | enforced |
| additionalProperties beside properties | 1 of 3 wrong pass | enforced | 1 of 3 wrong pass |
| patternProperties | enforced | enforced | enforced |
| patternProperties that overlap | 2 of 2 wrong pass | refused | refused |
| patternProperties beside additionalProperties | enforced | refused | enforced |
| propertyNames | enforced | enforced | refused |
| propertyNames of enum | enforced | enforced | refused |
| propertyNames beside properties | 1 of 1 wrong pass | refused | refused |
| minProperties, maxProperties | enforced | enforced | refused |
| minProperties of any names | 1 of 2 wrong pass | refused | 1 of 2 wrong pass |
| dependentRequired | 1 of 1 wrong pass | refused | refused |
| dependentSchemas | 1 of 1 wrong pass | refused | refused |
| unevaluatedProperties | enforced | enforced | refused |
| anyOf | enforced | enforced | enforced |
| anyOf beside other keywords | 2 of 2 wrong pass | refused | enforced |
| oneOf of branches apart | enforced | enforced | enforced |
| oneOf of branches that overlap | 1 of 1 wrong pass | refused | refused |
| allOf of one schema | enforced | enforced | enforced |
| allOf | 2 of 2 wrong pass | refused | enforced |
| not | 1 of 1 wrong pass | refused | refused |
| if, then, else | 2 of 2 wrong pass | refused | refused |
| $ref | enforced | enforced | enforced |
| $ref to itself | enforced | enforced | enforced |
| $ref without end | enforced | refused | enforced |
| $ref beside other keywords | 1 of 1 wrong pass | refused | enforced |
| $anchor | 1 of 1 wrong pass | refused | enforced |
| $dynamicRef | 1 of 1 wrong pass | refused | refused |
| keywords without type | 1 of 1 wrong pass | refused | enforced |
| false | refused | refused | enforced |

On the JSON-Schema-Test-Suite for draft 2020-12, most of whose schemas name no type:

| library | schemas | refused | wrong texts that pass | right texts shut out |
|---|---|---|---|---|
| xgrammar | 368 | 24 | 258 of 481 | 77 of 719 |
| cb_rollout | 368 | 273 | 0 of 156 | 28 of 157 |
| llguidance | 368 | 204 | 0 of 237 | 22 of 352 |
"""

METRICS_HEADER = """# Metrics

Every logged metric, from `scripts/pages/metrics_table.py`; `scripts/write_docs.py` writes it.

- Under `attach`, the trainer's logger (wandb, TensorBoard, trackio) gets the metrics, and so does
  `<output_dir>/cb_rollout/metrics.jsonl`.
- In your own loop, `metrics()` of a `RolloutGenerator` or a `GroupCollector` returns them, and
  `generator.record(...)` writes the same files, and logs nowhere else
  ([Records of your own loop](observability.md#records-of-your-own-loop)).
- `cb-rollout report RUN [RUN]` draws one run, or two side by side; `cb-rollout watch RUN` follows a
  run.
- wandb is used only if the trainer's `report_to` names it or, in your own loop, if it has a run. It
  also gets the table `rollout/tokens` and the [histograms](#histograms). TRL imports wandb if it is
  installed.
- `scripts/pages/wandb_panels.py` creates the panels of a wandb workspace.

"""

METRICS_FOOTER = """
A histogram has 64 bins from the smallest value to the largest, over the sampled tokens that the
loss counts. Under `attach` it covers the main process since its last log, whichever sequences are
recorded; with `record` it covers all processes.

Under `attach`, TRL also logs `sampling/sampling_logp_difference/{mean,max}`, the difference between
sampled and old log-probabilities on every completion, and `sampling/importance_sampling_ratio/*`,
the correction that follows from it. While the forward for old log-probabilities is skipped
(`old_logps`), it is the difference to the loss's own. `AsyncGRPOTrainer` logs `sample/staleness_*`
per completion, for its oldest token.
"""

REPLAY_HEADER = """# What is compared with TRL

Does a trainer learn the same with `attach` as without it? `tests/training/test_replay.py`
compares whole training runs, with every setting below:

1. An attached trainer trains a tiny model on the CPU, and the test records the completions of each
   rollout.
2. A trainer of the same class, with the same settings, data and seed, trains without `attach`. Its
   model's `generate` returns the recorded completions of each prompt. TRL itself computes masks,
   rewards, old log-probabilities, losses and optimizer steps.
3. The test compares the final weights, and every metric that both trainers log.

The results, in float32 unless the row says otherwise:

- *equal*: no weight differs by more than 2e-5 times the largest change of any weight. No metric
  differs by more than 5e-5, relative to its value or to 0.1, whichever is larger. For comparison,
  padding a stock trainer's batches to another width (`pad_to_multiple_of`) moves its weights by up
  to 5e-6 times that largest change, which is one rounding of the largest weight.
- *equal to padding*: weights and metrics differ by at most twice as much as another padding width
  moves them in a stock trainer. bfloat16 rounds coarsely, and AdamW divides a gradient's rounding
  error by the gradient's own size.
- *refused*: `attach` raises `ConfigurationError`.
- *differs*: the row gives the reason. If the reason no longer holds, the test fails.

| metric | not compared, because |
|---|---|
| `*runtime`, `*_per_second`, `step_time` | it measures time |
| `rollout/*` | only an attached trainer logs it ([Metrics](metrics.md)) |
| `sampling/*` | TRL logs it for other engines' completions; our ratios are 1, up to rounding |

`tests/distributed/test_trl_replay.py` compares eight of the settings in two processes, and
`tests/training/test_images.py` compares training with images.
`scripts/write_docs.py` writes this page from `scripts/pages/replay_table.py`.

| setting | of the trainer | of `RolloutConfig` | result |
|---|---|---|---|
"""

SMOLLM2 = "SmolLM2-135M-Instruct"

WORKLOADS = {
    "64 chats": f"One rollout of {SMOLLM2}: 64 chats, each until the model ends it",
    "4 prompts of 1,000 tokens, 16 chats each": (
        f"One rollout of {SMOLLM2}: 4 prompts of 1,000 tokens x 16 completions"
    ),
    "16 chats to 1,024 tokens": f"One rollout of {SMOLLM2}: 16 chats of up to 1,024 tokens",
    **{
        f"chat_step, {size} completions": (
            f"One GRPO step of {SMOLLM2}: {size} completions of at most 64 tokens"
        )
        for size in (16, 64, 128)
    },
    "long_tailed_groups": "One rollout: 16 prompts x 8 completions, long-tailed lengths",
    "equal_lengths": "One rollout: 128 prompts, 64 tokens each",
    "long_tailed_groups_135m": (
        "One rollout of a 135M Llama: 8 prompts x 8 completions, long-tailed lengths"
    ),
    "equal_lengths_135m": "One rollout of a 135M Llama: 64 prompts, 40 tokens each",
    "long_tailed_groups_bfloat16": "One rollout in bfloat16 and float32, long-tailed lengths",
    "equal_lengths_bfloat16": "One rollout in bfloat16 and float32, equal lengths",
    "served": "The long-tailed rollout's requests over HTTP",
    "grpo_step": "One GRPO step through TRL, long-tailed lengths",
    "grpo_step_400x8": "One GRPO step: 8 prompts of 400 tokens x 8 completions",
    "grpo_step_400x16": "One GRPO step: 4 prompts of 400 tokens x 16 completions",
}

# Rows of the README's table: what was measured, and beside which contender. The page on benchmarks
# shows everything.
RATIOS_OF_README = (
    ("a GRPO step of 16 completions", "chat_step, 16 completions", "TRL generate"),
    ("a GRPO step of 128 completions", "chat_step, 128 completions", "TRL generate"),
    ("a rollout of 64 chats", "64 chats", "model.generate"),
    ("a rollout of 64 chats", "64 chats", "transformers CB"),
    ("a rollout of 64 chats", "64 chats", "vLLM 0.32.0"),
    ("a rollout of 16 long chats", "16 chats to 1,024 tokens", "vLLM 0.32.0"),
)

# Names of contenders, for a reader who does not know the benchmarks yet.
CONTENDER_NAMES = {
    "TRL generate": "TRL with `generate`",
    "model.generate": "transformers' `generate`",
    "transformers CB": "transformers' continuous batching",
    "vLLM 0.32.0": "vLLM 0.32",
}

# A record holds the versions of more packages.
VERSIONS_SHOWN = ("torch", "transformers", "trl")

# Cards of the modelled tables: figures of the first, and shares of the others.
CARD_SHOWN, OTHER_CARDS = "H100", ("A100", "H200")

SHARES = (
    "The matmul bound is the speed if only the workload's matrix products took time, at the rate "
    "measured in the same run."
)


def compatibility() -> str:
    """Return the page on pairs of features that are refused."""
    rows = sorted(
        f"| {pair.feature} | {pair.other} | {described(pair)} |" for pair in COMBINATIONS.values()
    )
    pairs = COMPATIBILITY_HEADER + "\n".join([*rows, ""])
    return pairs + generation_fields() + batching_fields() + compile_fields()


def generation_fields() -> str:
    """Return the table of the fields of transformers' `GenerationConfig`."""
    rows = {
        name: ("read", f"`SamplingParams({name}=...)`") for name in fields_of_generation.SAME_NAME
    }
    for name, ours in fields_of_generation.OTHER_NAME.items():
        rows[name] = "read", f"`SamplingParams`: {ours}"
    for name, reader in fields_of_generation.READ_ELSEWHERE.items():
        rows[name] = "read", reader
    for name, reason in fields_of_generation.NO_EFFECT.items():
        rows[name] = "no effect", reason
    for name, refusal in fields_of_generation.REFUSED.items():
        rows[name] = "refused", f"{refusal.reason}; {refusal.advice}"
    return GENERATION_FIELDS_HEADER + field_rows(rows)


def batching_fields() -> str:
    """Return the table of the fields of transformers' `ContinuousBatchingConfig`."""
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(RolloutConfig)}
    rows = {}
    for name in reference.SAME_NAME:
        rows[name] = "read", f"`RolloutConfig({name}=...)`. {helps[name]}"
    for name, ours in reference.RENAMED.items():
        rows[name] = "read", f"`RolloutConfig({ours}=...)`. {helps[ours]}"
    for name, (values, reason) in reference.NO_COUNTERPART.items():
        is_refused = values not in ((), (True, False))
        rows[name] = "refused" if is_refused else "no effect", reason
    return BATCHING_FIELDS_HEADER + field_rows(rows)


def compile_fields() -> str:
    """Return the table of the fields of transformers' `CompileConfig`."""
    rows = {name: ("read", meaning) for name, meaning in compilation.FIELDS.items()}
    for name, reason in compilation.FIELDS_WITHOUT_EFFECT.items():
        rows[name] = "no effect", reason
    return COMPILE_FIELDS_HEADER + field_rows(rows)


def field_rows(rows: dict[str, tuple[str, str]]) -> str:
    """Return the rows of a table of fields: name, what becomes of it, by what or why."""
    lines = [f"| `{name}` | {fate} | {why} |" for name, (fate, why) in sorted(rows.items())]
    return "\n".join([*lines, ""])


def command_line() -> str:
    """Return the page on the command line, with a table for each command."""
    # argparse names no other way to a parser's commands and options.
    (commands,) = (a for a in create_parser()._actions if isinstance(a.choices, dict))
    return COMMAND_LINE_HEADER + "".join(
        command(name, parser) for name, parser in commands.choices.items()
    )


def command(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the part of one command."""
    rows = [
        f"| {option(action)} | {(action.help or '').replace('%%', '%')} |"
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    ]
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    after = f"\n```text\n{parser.epilog}\n```\n" if parser.epilog else ""
    return f"\n## {name}\n\n{parser.description}\n\n{table}\n{after}"


def option(action: argparse.Action) -> str:
    """Return an option as it is typed."""
    name = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return f"`[{name}]`" if action.nargs == "?" else f"`{name}`"
    if not action.metavar and action.choices:
        name = f"{{{','.join(action.choices)}}}"
    value = "" if action.nargs == 0 else f" {name}"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def configuration() -> str:
    """Return the configuration page."""
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} "
        f"| {COSTS.get(field.name, '')} |"
        for field in dataclasses.fields(RolloutConfig)
    ]
    return CONFIGURATION_HEADER + "\n".join(rows) + "\n"


def sampling() -> str:
    """Return the page on sampling."""
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} | "
        f"{COUNTERPARTS.get(field.name, '-')} |"
        for field in dataclasses.fields(SamplingParams)
    ]
    return SAMPLING_HEADER + "\n".join(rows) + "\n" + SAMPLING_FOOTER


def metrics() -> str:
    """Return the page on metrics, with a table for each panel."""
    tables = []
    listed = (*METRICS, *HISTOGRAMS)
    for panel in dict.fromkeys(metric.panel for metric in listed):
        rows = [
            f"| `{m.name}` | {m.unit} | {m.meaning} | {m.advice} |"
            for m in listed
            if m.panel == panel
        ]
        head = f"## {panel}\n\n| name | unit | meaning | when it moves |\n|---|---|---|---|\n"
        tables.append(head + "\n".join(rows) + "\n")
    return METRICS_HEADER + "\n".join(tables) + METRICS_FOOTER


def replays() -> str:
    """Return the page on trainings that are replayed in a stock trainer."""
    rows = []
    for replay in REPLAYS:
        columns = replay.name, fields_text(replay.trainer), fields_text(replay.rollout)
        rows.append(f"| {' | '.join(columns)} | {replay_result(replay)} |\n")
    return REPLAY_HEADER + "".join(rows)


def fields_text(fields: dict[str, Any]) -> str:
    """Return the fields of a config as its arguments."""
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def replay_result(replay: Replay) -> str:
    """Return what came out of the comparison."""
    if replay.refused is not None:
        return f"refused: {replay.refused}"
    if replay.differs is not None:
        return f"differs: {replay.differs}"
    return "equal to padding" if replay.is_coarse else "equal"


def benchmark_tables(workloads: Iterable[str]) -> str:
    """Return the benchmark tables of some workloads, from the recorded runs."""
    records = read_records(BENCHMARKS)
    tables = [
        workload_table(WORKLOADS[workload], record["results"][workload], record)
        for workload in workloads
        for record in records
        if workload in record.get("results", ())
    ]
    return "\n".join(tables)


def ratio_table() -> str:
    """Return the README's table: how much faster than each contender, from the recorded runs.

    Records of a further processor are in a folder of `BENCHMARKS`, and get a column.
    """
    folders = [BENCHMARKS, *sorted({path.parent for path in BENCHMARKS.glob("*/*.json")})]
    machines = [read_records(folder) for folder in folders]
    header = ["workload", "compared with"]
    dates = []
    for records in machines:
        (measured,) = {r["device"] for r in records if holds_any_ratio(r)}
        header.append(f"on {measured}")
        dates += [r["date"] for r in records if holds_any_ratio(r)]
    lines = [row_of(header), row_of(["---"] * len(header))]
    for title, workload, contender in RATIOS_OF_README:
        cells = [title, CONTENDER_NAMES[contender]]
        cells += [ratio_of(records, workload, contender) for records in machines]
        lines.append(row_of(cells))
    conditions = "cb_rollout's speed over the other's, with SmolLM2-135M-Instruct in float32"
    note = f"medians of alternating turns in one run, 2 threads, {min(dates)} to {max(dates)}"
    return "\n".join([*lines, "", f"<sub>{conditions}; {note}.</sub>", ""])


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def holds_any_ratio(record: dict[str, Any]) -> bool:
    """Return whether a record has a workload of the README's table."""
    workloads = {workload for _, workload, _ in RATIOS_OF_README}
    return not workloads.isdisjoint(record.get("results", ()))


def ratio_of(records: list[dict[str, Any]], workload: str, contender: str) -> str:
    """Return a cell of the README's table; "-": these records lack the workload."""
    found = [record for record in records if workload in record.get("results", ())]
    if not found:
        return "-"
    (record,) = found
    contenders = record["results"][workload]
    return f"{times_better(contenders[OURS], contenders[contender]):.1f}x"


def row_of(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def workload_table(title: str, contenders: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the table of one workload: medians, their spread, and ratios to cb_rollout."""
    has_shares = all("matmul_share" in figures for figures in contenders.values())
    columns = {
        "contender": list(contenders),
        "median": [value_text(row["median"], row["unit"]) for row in contenders.values()],
    }
    if record["repetitions"] > 1:
        columns["min to max"] = [
            f"{number_text(row['min'])} to {number_text(row['max'])}" for row in contenders.values()
        ]
    columns["cb_rollout is"] = [
        "-" if name == OURS else f"{times_better(contenders[OURS], row):.1f}x as fast"
        for name, row in contenders.items()
    ]
    if has_shares:
        columns["of the matmul bound"] = [f"{r['matmul_share']:.0%}" for r in contenders.values()]
    rows = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"**{title}**", "", *lines, "", caption(record, has_shares), ""])


def caption(record: dict[str, Any], has_shares: bool) -> str:
    """Return a table's caption: machine, turns, date and versions."""
    shares = f" {SHARES}" if has_shares else ""
    turns = f"{record['repetitions']} turn{'s' * (record['repetitions'] != 1)} each"
    machine = f"{record['device']}, {record['threads']} threads"
    return f"<sub>{machine}, {turns}, {dated_versions(record)}.{shares}</sub>"


def gpu_model_tables(record: dict[str, Any]) -> str:
    """Return the tables of the modelled decode steps and prefills, one a model and kind."""
    return "\n".join(
        gpu_model_table(kind, name.split()[2], record)
        for kind in ("decode", "prefill")
        for name in record["results"]
        if name.startswith(f"{kind} of") and name.endswith(f"on {CARD_SHOWN}, modelled")
    )


def optimizations_table(record: dict[str, Any]) -> str:
    """Return the table of modelled optimizations: launches, time and what is saved, by model."""
    groups = {
        name: group
        for name, group in record["results"].items()
        if name.startswith("optimizations of")
    }
    models = [name.split()[6].rstrip(",") for name in groups]
    first = next(iter(groups))
    head = ["", *(f"{m}: {what}" for m in models for what in ("launches", "ms", "saved"))]
    lines = [head, ["---"] * len(head)]
    for name in groups[first]:
        line = [f"{name}, modelled"]
        for group in groups.values():
            saved = group[name]["percent_saved"]
            line += figures(group[name], "launches", "milliseconds")
            line.append("-" if name.endswith("as it is") else f"{saved:.0f}%")
        lines.append(line)
    step = first.partition(f"{models[0]}, ")[2].removesuffix(", modelled")
    title = (
        f"**Optimizations of a decode step that runs the model's own forward, of {step}: "
        f"{record['note']}**"
    )
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def samplings_table(record: dict[str, Any]) -> str:
    """Return the table of steps by sampling parameters: launches and times, by model."""
    groups = {
        name: group for name, group in record["results"].items() if name.startswith("sampling of")
    }
    models = [name.split()[6].rstrip(",") for name in groups]
    first = next(iter(groups))
    columns = ("launches", "outside of the graph", "milliseconds", "sampling_milliseconds")
    shown = ("launches", "outside of the graph", "ms", "of them sampling")
    head = ["", *(f"{model}: {column}" for model in models for column in shown)]
    lines = [head, ["---"] * len(head)]
    for name in groups[first]:
        found = (x for group in groups.values() for x in figures(group[name], *columns))
        lines.append([f"{name}, modelled", *found])
    step = first.partition(f"{models[0]}, ")[2].removesuffix(", modelled")
    title = f"**Sampling of a decode step of {step}: {record['note']}**"
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def compiled_table(record: dict[str, Any]) -> str:
    """Return the table of compiled steps: launches, time and share of the roofline, by model."""
    groups = record["results"]
    models = [name.split()[4].rstrip(",") for name in groups]
    shown = ("launches", "a layer", "ms", "roofline")
    head = ["", *(f"{model}: {column}" for model in models for column in shown)]
    lines = [head, ["---"] * len(head)]
    for name in next(iter(groups.values())):
        line = [f"{name}, modelled"]
        for group in groups.values():
            line += figures(group[name], "launches", "launches_per_layer", "milliseconds")
            line.append(share(group[name]))
        lines.append(line)
    step = next(iter(groups)).partition(f"{models[0]}, ")[2].removesuffix(", modelled")
    title = f"**A compiled decode step of {step}: {record['note']}**"
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([title, "", *rows, "", f"<sub>{dated_versions(record)}.</sub>", ""])


def gpu_model_table(kind: str, model: str, record: dict[str, Any]) -> str:
    """Return the table of one model: launches, milliseconds and shares, by contender."""
    by_card = {
        card: contenders_by_rows(record["results"][f"{kind} of {model} on {card}, modelled"])
        for card in (CARD_SHOWN, *OTHER_CARDS)
    }
    peers = [name for name in next(iter(by_card[CARD_SHOWN].values())) if not name.startswith(OURS)]
    head = ["rows x tokens", "launches", "a layer", "ms", "roofline"]
    head += [f"roofline, {card}" for card in OTHER_CARDS]
    head += ["ms with top-p"] * (kind == "decode")
    head += [f"{peer}: {column}" for peer in peers for column in ("launches", "ms", "roofline")]
    lines = [head, ["---"] * len(head)]
    for rows, contenders in by_card[CARD_SHOWN].items():
        ours, top_p = contenders[OURS], contenders.get(f"{OURS}, top-p")
        line = [f"{rows}, modelled"]
        line += figures(ours, "launches", "launches_per_layer", "milliseconds")
        line += [share(ours)] + [
            share(by_card[card].get(rows, {}).get(OURS)) for card in OTHER_CARDS
        ]
        if kind == "decode":
            line += figures(top_p, "milliseconds") if top_p else ["-"]
        for peer in peers:
            line += [
                *figures(contenders[peer], "launches", "milliseconds"),
                share(contenders[peer]),
            ]
        lines.append(line)
    title = f"**{kind.capitalize()} of Qwen3 {model} on an {CARD_SHOWN}: {record['note']}**"
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([title, "", *rows, "", f"<sub>{dated_versions(record)}.</sub>", ""])


def dated_versions(record: dict[str, Any]) -> str:
    """Return the date of a record and the versions that it was made with."""
    versions = {k: v for k, v in record["versions"].items() if k in VERSIONS_SHOWN}
    return f"{record['date']}; " + ", ".join(f"{k} {v}" for k, v in versions.items())


def contenders_by_rows(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each contender, by the rows of the step."""
    found: dict[str, dict[str, Any]] = {}
    for name, row in group.items():
        rows, _, contender = name.partition(" tokens, ")
        found.setdefault(rows, {})[contender] = row
    return found


def figures(row: dict[str, float], *names: str) -> list[str]:
    """Return figures of a row as text."""
    return [number_text(row[name]) for name in names]


def share(row: dict[str, float] | None) -> str:
    """Return a share of the roofline as text; a dash where the step does not fit the card."""
    return f"{row['percent_of_roofline']:.0f}%" if row else "-"


def with_gpu_model(text: str) -> str:
    """Return a page with its tables of the model of a GPU renewed."""
    record, compiled = (
        json.loads((BENCHMARKS / f"{name}_cpu.json").read_text())
        for name in ("gpu_model", "gpu_compiled")
    )
    tables = gpu_model_tables(record), samplings_table(record), optimizations_table(record)
    return replaced(text, "gpu model", "\n".join((compiled_table(compiled), *tables)))


def agreement_table(record: dict[str, Any]) -> str:
    """Return the table of a real model's distances: mean and largest, by precision."""
    precisions = list(record["agreement"])
    names = next(iter(record["agreement"].values()))
    tokens = ", ".join(f"{number:,}" for number in record["tokens"].values())
    head = ["", *precisions]
    lines = [head, ["---"] * len(head)]
    for name in names:
        pairs = (record["agreement"][precision][name] for precision in precisions)
        lines.append([name, *(f"{pair['mean']:.1e}, {pair['max']:.1e}" for pair in pairs)])
    versions = {k: v for k, v in record["versions"].items() if k in VERSIONS_SHOWN}
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    machine = f"{record['device']}, {record['threads']} threads, {record['date']}"
    note = (
        f"<sub>Mean and largest difference, in nats, over {tokens} sampled tokens of "
        f"{record['sequences']} chats. {machine}; {said} ([record](agreement_cpu.json)).</sub>"
    )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note, ""])


def with_agreement(text: str) -> str:
    """Return a page with the distances of a real model renewed."""
    path = BENCHMARKS / "agreement_cpu.json"
    table = agreement_table(json.loads(path.read_text())) if path.exists() else "Not recorded yet."
    return replaced(text, "agreement", table.rstrip())


# Engines of `scripts/measure/audit.py`, as they are called.
AUDITED_ENGINES = {
    "loop": "a plain loop",
    "ours": "this package",
    "manager": "transformers' manager",
    "vllm": "vLLM",
    "images": "prompts with images",
}


def audit_table(record: dict[str, Any]) -> str:
    """Return tables of injected faults: the cause that came first, by model and dtype."""
    engines = list(dict.fromkeys(row["engine"] for row in record["rows"]))
    tables = []
    for engine in engines:
        rows = [row for row in record["rows"] if row["engine"] == engine]
        cells = {(r["fault"], f"{r['model']}, {r['dtype']}"): r for r in rows}
        names = list(dict.fromkeys(name for _, name in cells))
        head = [AUDITED_ENGINES[engine], *names]
        lines = [head, ["---"] * len(head)]
        for fault in dict.fromkeys(fault for fault, _ in cells):
            found = [cells.get((fault, name)) for name in names]
            lines.append([fault, *(audited_cell(row) for row in found)])
        tables += [*(f"| {' | '.join(line)} |" for line in lines), ""]
    rows = record["rows"]
    right = sum(row["found"] == row["expected"] for row in rows)
    said = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if n in VERSIONS_SHOWN)
    note = (
        f"<sub>{right} of {len(rows)} right{clean_counts(record['clean'])}. {record['device']}, "
        f"{record['date']}; {said} ([record](benchmarks/audit_cpu.json)).</sub>"
    )
    return "\n".join([*tables, note, ""])


def audited_cell(row: dict[str, Any] | None) -> str:
    """Return a cell: whether the cause of a fault was named."""
    if row is None:
        return "-"
    return "right" if row["found"] == row["expected"] else row["found"]


def clean_counts(counts: list[dict[str, Any]]) -> str:
    """Return the alarms in rollouts without a fault, in words."""
    if not counts:
        return ""
    alarms, clean = (sum(own[name] for own in counts) for name in ("alarms", "rollouts"))
    each = ", ".join(
        f"{sum(own['rollouts'] for own in counts if own['engine'] == engine):,} of {name}"
        for engine, name in AUDITED_ENGINES.items()
        if any(own["engine"] == engine for own in counts)
    )
    return f"; {alarms} alarms in {clean:,} rollouts without a fault ({each})"


def with_audit(text: str) -> str:
    """Return a page with the causes that audits named renewed."""
    path = BENCHMARKS / "audit_cpu.json"
    table = audit_table(json.loads(path.read_text())) if path.exists() else "Not recorded yet."
    return replaced(text, "audit", table.rstrip())


def learning_table(record: dict[str, Any]) -> str:
    """Return the table of trainings of equal minutes: held-out accuracy and steps."""
    head = ["path", "seed", "held-out accuracy", "points", "steps", "seconds a step"]
    lines = [head, ["---"] * len(head)]
    for run in sorted(record["runs"], key=lambda run: (run["path"] != OURS, run["seed"])):
        gain = 100 * (run["after"] - run["before"])
        accuracy = f"{run['before']:.1%} to {run['after']:.1%}"
        seconds, steps = run["curve"][-1][0], run["num_steps"]
        path, seed = run["path"], str(run["seed"])
        lines.append([path, seed, accuracy, f"{gain:+.1f}", str(steps), f"{seconds / steps:.1f}"])
    said = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    note = (
        f"<sub>{record['minutes']:g} minutes of training each, the first step's checks included; "
        f"{record['num_held_out']} held-out problems; {record['device']}, "
        f"{record['runs'][0]['threads']} threads, {record['date']}; {said} "
        "([record](benchmarks/learning_cpu.json)).</sub>"
    )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note, ""])


def with_learning(text: str) -> str:
    """Return a page with the trainings of a real model renewed."""
    path = BENCHMARKS / "learning_cpu.json"
    table = learning_table(json.loads(path.read_text())) if path.exists() else "Not recorded yet."
    return replaced(text, "learning", table.rstrip())


def with_tables(text: str, workloads: Iterable[str]) -> str:
    """Return a page with its benchmark tables renewed."""
    return replaced(text, "benchmarks", benchmark_tables(workloads))


def replaced(text: str, name: str, tables: str) -> str:
    """Return a page with what stands between the marks of `name` replaced."""
    between = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)"
    return re.sub(between, lambda _: f"\n{tables}\n", text, flags=re.DOTALL)


def main() -> int:
    """Write the documents, or only compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = {
        ROOT / "docs" / "command_line.md": command_line(),
        ROOT / "docs" / "compatibility.md": compatibility(),
        ROOT / "docs" / "configuration.md": configuration(),
        ROOT / "docs" / "metrics.md": metrics(),
        ROOT / "docs" / "replay.md": replays(),
        ROOT / "docs" / "sampling.md": sampling(),
    }
    readme = ROOT / "README.md"
    wanted[readme] = replaced(readme.read_text(), "ratios", ratio_table())
    benchmarks = BENCHMARKS / "README.md"
    tables = with_tables(benchmarks.read_text(), WORKLOADS)
    wanted[benchmarks] = with_agreement(with_gpu_model(tables))
    learning = ROOT / "docs" / "learning.md"
    wanted[learning] = with_learning(learning.read_text())
    audit = ROOT / "docs" / "audit.md"
    wanted[audit] = with_audit(audit.read_text())
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(wanted[path])
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
