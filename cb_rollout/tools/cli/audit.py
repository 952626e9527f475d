"""`cb-rollout audit`: name the cause of a difference between rollouts and a trainer's model."""

import argparse
from dataclasses import asdict
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.tools.cli.command import EXIT_PARTLY, Answer, add_json, real_number, whole_number

TRUNCATION = ("top_k", "top_p", "min_p", "repetition_penalty")


def add_audit(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "audit",
        help="say why log-probabilities of rollouts are not the model's",
        description="Score recorded rollouts under a model and under what may have gone wrong, and "
        "rank the causes. RECORDS is a trainer's output_dir, or JSON lines with prompt, token ids "
        "and log-probabilities of any engine. Exit code 1: rounding does not explain them.",
    )
    parser.add_argument("records", metavar="RECORDS", help="a run's directory, or a JSONL file")
    parser.add_argument("--model", required=True, help="the checkpoint that should have sampled")
    text = "an earlier checkpoint; may be repeated"
    parser.add_argument("--version", action="append", default=[], help=text)
    text = "a checkpoint whose tokenizer the engine may have had; may be repeated"
    parser.add_argument("--tokenizer", action="append", default=[], help=text)
    parser.add_argument("--run", dest="run_id", metavar="ID", help="a run of RECORDS (the last)")
    parser.add_argument("--step", type=whole_number, help="a step of that run (the last recorded)")
    parser.add_argument("--temperature", type=real_number, default=1.0, help="of the samples (1)")
    for name in TRUNCATION:
        reader = whole_number if name == "top_k" else real_number
        parser.add_argument(f"--{name.replace('_', '-')}", type=reader, help="of the samples")
    parser.add_argument("--logprobs-mode", default="policy", help="policy (default) or processed")
    parser.add_argument(
        "--num-sequences", type=whole_number, default=16, help="most that are scored (16)"
    )
    parser.add_argument("--dtype", default="auto", help="the trainer's (auto: the checkpoint's)")
    parser.add_argument("--device", default="auto", help="auto: a GPU where there is one")
    add_json(parser)
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> Answer:
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.rollout.audit.auditor import audit
    from cb_rollout.rollout.audit.records import read_rollouts
    from cb_rollout.rollout.checkpoint import load_model, load_tokenizer

    tokenizer = load_tokenizer(arguments.model)
    outputs = read_rollouts(
        arguments.records,
        tokenizer,
        run_id=arguments.run_id,
        step=arguments.step,
        temperature=arguments.temperature,
    )
    params = _truncating_params(arguments)
    dtype = arguments.dtype
    report = audit(
        outputs,
        load_model(arguments.model, dtype, arguments.device),
        tokenizer=tokenizer,
        versions={name: load_model(name, dtype, "cpu").state_dict for name in arguments.version},
        tokenizers={name: load_tokenizer(name) for name in arguments.tokenizer},
        sampling_params=params,
        logprobs_mode=arguments.logprobs_mode,
        num_sequences=arguments.num_sequences,
    )
    value = {"cause": report.cause, "sentence": report.sentence, **asdict(report)}
    exit_code = 0 if report else EXIT_PARTLY
    return Answer(str(report), value, exit_code)


def _truncating_params(arguments: argparse.Namespace) -> SamplingParams | None:
    """Return the sampling parameters; None: no option truncates the distribution."""
    truncation: dict[str, Any] = {}
    for name in TRUNCATION:
        value = getattr(arguments, name)
        if value is not None:
            truncation[name] = value
    if not truncation:
        return None
    return SamplingParams(temperature=arguments.temperature, **truncation)
