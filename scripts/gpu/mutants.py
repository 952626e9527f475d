"""Undo each mend of the GPU path in a copy of this checkout, and see that its test fails.

    python scripts/gpu/mutants.py                # all, one after the other; minutes
    python scripts/gpu/mutants.py N1 C11         # those of these findings

Prints the table of docs/decisions/0042-a-mend-of-the-gpu-path-is-held-by-a-mutant.md. The exit
status is 1 if a test passed without its mend.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ENGINE, TESTS, INVARIANTS = "cb_rollout/engine", "tests/engine", "tests/invariants"
GRAPHS = f"{ENGINE}/cuda_graphs"
KERNELS, CORE = f"{ENGINE}/attention/triton/kernels.py", f"{ENGINE}/core/engine.py"
PRETENDED = f"{INVARIANTS}/test_pretended_device.py"
TRITON_TESTS = f"{TESTS}/attention/test_triton_kernels.py"


class Mutant(NamedTuple):
    """A mend that is undone, and the test that sees it."""

    finding: str
    undone: str
    """What the code does then."""
    file: str
    right: str
    wrong: str
    test: str
    """`file::function`."""
    only: str = ""
    """Selects cases of the test, as pytest's `-k` does."""


MUTANTS = (
    Mutant(
        "A1",
        "pages under autocast keep float32 keys",
        f"{ENGINE}/model/probe.py",
        "if keys is key and values is value and torch.is_autocast_enabled(key.device.type):",
        "if False:",
        f"{INVARIANTS}/test_captured_precisions.py::"
        "test_steps_are_captured_and_give_what_the_trainers_forward_gives",
        "default",
    ),
    Mutant(
        "A2",
        "a capture that fails leaves the thread on its stream",
        f"{GRAPHS}/capture.py",
        "with torch.cuda.stream(self._stream):",
        "if True:",
        f"{TESTS}/cuda_graphs/test_capture.py::"
        "test_the_thread_is_on_its_own_stream_after_a_capture_that_failed",
    ),
    Mutant(
        "A2",
        "a capture begins of a step that waits",
        f"{GRAPHS}/capture.py",
        "with _refusing_waits():",
        "if True:",
        f"{TESTS}/cuda_graphs/test_capture.py::"
        "test_a_step_that_waits_for_the_device_is_refused_before_a_capture_begins",
    ),
    Mutant(
        "A3",
        "experts run torch's product, which waits",
        "cb_rollout/compat/moe.py",
        "if product is None or not waits_for_groups(weight):",
        "if True:",
        f"{INVARIANTS}/test_captured_precisions.py::"
        "test_steps_are_captured_and_give_what_the_trainers_forward_gives",
        "experts",
    ),
    Mutant(
        "A4",
        "a path that is not the best is not warned of",
        f"{GRAPHS}/selection.py",
        "if is_news and graph_obstacle(self._device) is None:",
        "if False:",
        f"{INVARIANTS}/test_captured_precisions.py::"
        "test_a_path_that_is_not_the_best_is_warned_of_with_its_reason",
    ),
    Mutant(
        "A4",
        "a replaced forward keeps the graphs of the one before",
        "cb_rollout/compat/module_state.py",
        "captured.append((weakref.ref(module), forward_of(module)))",
        "captured.append(weakref.ref(module))",
        f"{INVARIANTS}/test_fast_path.py::"
        "test_a_replaced_forward_is_captured_and_captured_anew_when_it_is_replaced_again",
    ),
    Mutant(
        "A5",
        "memory of graphs is planned for the cache too",
        f"{ENGINE}/memory/device.py",
        'if device.type != "cuda":\n        return memory(device)\n    torch.cuda.empty_cache()',
        "if True:\n        return memory(device)\n    torch.cuda.empty_cache()",
        f"{PRETENDED}::"
        "test_memory_of_graphs_and_gaps_between_tensors_are_not_planned_for_the_cache",
    ),
    Mutant(
        "B1",
        "prompts that continue are bounded by their new tokens alone",
        f"{ENGINE}/scheduler/scheduler.py",
        "self.has_history and gathers_much",
        "False",
        f"{TESTS}/kv_cache/test_sizing.py::test_no_prefill_gathers_more_than_is_planned",
    ),
    Mutant(
        "B2",
        "each capture has a stream",
        f"{GRAPHS}/capture.py",
        "caller = torch.cuda.current_stream(self._device)",
        "caller = torch.cuda.current_stream(self._device)\n"
        "        self._stream = torch.cuda.Stream(self._device)",
        f"{TESTS}/cuda_graphs/test_capture.py::"
        "test_all_captures_run_on_one_stream_which_waits_for_the_threads_and_is_waited_for",
    ),
    Mutant(
        "B3",
        "a step captures its own graph while another thread trains",
        f"{GRAPHS}/graphs.py",
        "self._wanted[key] = None",
        "self.add(key, block_size)",
        f"{INVARIANTS}/test_fast_path.py::test_no_graph_is_captured_once_requests_run"
        "_and_what_they_wanted_is_in_the_next_pause",
    ),
    Mutant(
        "B4",
        "the engine's stream does not follow the trainer's",
        f"{ENGINE}/model/lease.py",
        "another stream than this thread's.\n"
        "        devices.wait_event(self._given_back, self._device)",
        "another stream than this thread's.",
        f"{PRETENDED}::test_the_streams_of_trainer_and_engine_follow_each_other",
    ),
    Mutant(
        "B5",
        "TF32 is held against float32's rounding",
        f"{ENGINE}/model/runner.py",
        "is_tf32 = self.computes_coarsely and self.compute_dtype == torch.float32",
        "is_tf32 = False",
        f"{TESTS}/model/test_check.py::"
        "test_float32_products_that_round_to_tf32_are_no_reason_to_run_rows_alone",
    ),
    Mutant(
        "B6",
        "the list of wheels lacks what TRL needs",
        "scripts/gpu_check.sh",
        "tzdata pyarrow dill",
        "tzdata pyarrow",
        "tests/benchmarks/test_gpu_check.py::"
        "test_the_wheels_are_what_trl_and_datasets_need_beside_what_a_machine_has",
    ),
    Mutant(
        "C1",
        "captured steps are the model's own forward",
        f"{GRAPHS}/selection.py",
        "if asked or runner.device.type in COMPILED_DEVICES:",
        "if asked:",
        f"{INVARIANTS}/test_compiled_decode.py::"
        "test_a_graph_captures_the_compiled_forward_which_follows_weights_in_place",
    ),
    Mutant(
        "C2",
        "a copy generates in the stream that trains",
        CORE,
        'if is_copied and device.type == "cuda":',
        "if False:",
        f"{PRETENDED}::test_a_copy_generates_on_a_stream_that_training_does_not_hold_up",
    ),
    Mutant(
        "C3",
        "a truncated row leaves the graph",
        f"{GRAPHS}/graph_sampler.py",
        "not (self.keeps_ids and params.is_truncated)",
        "not params.is_truncated",
        f"{INVARIANTS}/test_fast_path.py::test_truncated_rows_are_sampled_inside_the_graph",
    ),
    Mutant(
        "C4",
        "sampling reads float32 logits",
        f"{GRAPHS}/graph_sampler.py",
        "if logits_BV.stride(1) != 1:",
        "logits_BV = logits_BV.float()\n        if logits_BV.stride(1) != 1:",
        "tests/benchmarks/test_gpu_model.py::"
        "test_every_kind_of_sampling_is_three_kernels_of_the_graph",
    ),
    Mutant(
        "C5, N9",
        "few long rows have two stages",
        f"{ENGINE}/attention/triton/launch.py",
        "return FEW_ROW_STAGES if is_split and num_rows <= FEW_ROWS else NUM_STAGES",
        "return NUM_STAGES",
        f"{TRITON_TESTS}::test_few_rows_that_are_split_have_a_third_stage",
    ),
    Mutant(
        "C6",
        "a prompt that a group shares is not cut",
        KERNELS,
        "(tile_keys + shared_stretch - 1) // shared_stretch",
        "(tile_keys > 0).to(tl.int32)",
        f"{TRITON_TESTS}::test_a_prompt_of_one_group_is_cut_so_that_it_fills_the_card",
    ),
    Mutant(
        "C7",
        "stretches are those of the longest row",
        KERNELS,
        "own_stretch = stretch_of(tl.sum(own, 0),",
        "own_stretch = stretch_of(tl.max(own, 0) * num_rows,",
        f"{TRITON_TESTS}::test_one_long_row_among_short_ones_is_cut_alone",
    ),
    Mutant(
        "C8",
        "a new plan drops the graphs",
        CORE,
        "        self.release_cache()\n        if is_changed:",
        "        self._decoding.release()\n        self.release_cache()\n        if is_changed:",
        f"{INVARIANTS}/test_fast_path.py::test_graphs_are_kept_when_the_memory_is_planned_again",
    ),
    Mutant(
        "C9",
        "segments are padded for sdpa",
        f"{ENGINE}/attention/packed.py",
        'if implementation == "sdpa" and torch_compat.has_varlen(query, value, kwargs):',
        "if False:",
        f"{TESTS}/model/test_check.py::test_a_model_is_packed_where_pytorchs_own_kernel_attends",
    ),
    Mutant(
        "C10",
        "rows above 256 are padded to multiples of 256",
        f"{GRAPHS}/graphs.py",
        "ROW_INTERVAL = 64",
        "ROW_INTERVAL = 256",
        f"{TESTS}/cuda_graphs/test_graphs.py::test_sizes_up_to_1024_rows_waste_little_and_are_few",
    ),
    Mutant(
        "C11",
        "FSDP2 gathers shards as they train",
        "cb_rollout/weights/source.py",
        "if isinstance(tensor, DTensor) and is_smaller:",
        "if False:",
        "tests/distributed/test_gathered_bytes.py::test_shards_are_cast_before_they_are_gathered",
    ),
    Mutant(
        "C11",
        "FSDP2 gathers a tensor after the last one is copied",
        "cb_rollout/weights/source.py",
        "following = next(gathers, None)\n            yield tensors",
        "yield tensors\n            following = next(gathers, None)",
        "tests/distributed/test_gathered_bytes.py::"
        "test_the_next_tensor_is_gathered_while_one_is_copied",
    ),
    Mutant(
        "C12",
        "a copy's weights stay in sleep(level=2)",
        "cb_rollout/rollout/generator.py",
        "                self._weights.release()\n",
        "",
        f"{INVARIANTS}/test_weight_copy.py::"
        "test_a_copy_whose_weights_were_released_generates_as_one_that_never_slept",
    ),
    Mutant(
        "N1",
        "torch 2.11's kernel is given enable_gqa",
        "cb_rollout/compat/torch.py",
        'if "enable_gqa" in _signature(varlen_attn).parameters:',
        "if True:",
        f"{TESTS}/model/test_check.py::test_a_model_is_packed_where_pytorchs_own_kernel_attends",
    ),
    Mutant(
        "N2",
        "casts of the same rows stay apart under autocast",
        "cb_rollout/compat/inductor.py",
        "    merge_casts(module.graph)\n",
        "",
        f"{TESTS}/attention/test_joined_products.py::"
        "test_products_are_joined_and_no_weight_is_cast_in_any_precision",
    ),
    Mutant(
        "N3",
        "a tied head is held once, in float32",
        "cb_rollout/weights/copied.py",
        "weights_of(self._source, source.stored, dtype_of, adapter=adapter)",
        "weights_of(self._source, source.stored, adapter=adapter)",
        "tests/weights/test_weights.py::"
        "test_a_tied_head_is_held_once_more_in_the_compute_dtype_and_follows_each_sync",
    ),
    Mutant(
        "N4",
        "old log-probabilities are trusted below 0.1 nats",
        "cb_rollout/integrations/trl/guard.py",
        "not (agrees and clipped",
        "not (agrees.largest <= 0.1 and clipped",
        "tests/training/test_old_logps.py::test_logits_of_16_bits_that_are_large_are_trusted",
    ),
    Mutant(
        "N5",
        "the forward runs in accelerate's wrapper",
        f"{ENGINE}/model/runner.py",
        "called = accelerate_compat.below_accelerate(self.model)",
        "called = self.model",
        "tests/training/test_pretended_device.py::"
        "test_a_trainer_of_a_bfloat16_model_captures_each_graph_once",
    ),
    Mutant(
        "N6",
        "a tile of bfloat16 has the queries of its first row",
        KERNELS,
        "(first_row + member)",
        "(first_row + 0 * member)",
        f"{TRITON_TESTS}::test_tiles_of_a_prompt_in_bfloat16_are_rounded_once",
    ),
    Mutant(
        "N7",
        "the peers run before the GRPO steps",
        "scripts/gpu_check.sh",
        "bench grpo 60 --parts grpo\n",
        "bench peers 120 --parts peers\nbench grpo 60 --parts grpo\n",
        "tests/benchmarks/test_gpu_check.py::"
        "test_what_tells_most_runs_first_and_every_part_has_a_budget",
    ),
    Mutant(
        "N8",
        "eight rows wait for each step's tokens",
        f"{GRAPHS}/decode_path.py",
        "if not going or not self.graphs.follows(going, lengths):",
        "if len(going) <= 8 or not self.graphs.follows(going, lengths):",
        f"{PRETENDED}::test_steps_launch_ahead_of_their_tokens",
    ),
    Mutant(
        "N10",
        "adapters run unmerged where a copy fits",
        "cb_rollout/weights/__init__.py",
        "if devices.FREE_PER_COPY * (added - cast) + cast <= free:",
        "if False:",
        "tests/weights/test_adapters.py::test_on_a_gpu_auto_merges_into_a_copy_what_peft_merges",
    ),
    Mutant(
        "N11",
        "recurrent states have no graphs",
        f"{GRAPHS}/selection.py",
        '    if runner.recorder is not None:\n        return "needs router',
        "    if runner.attention_backend.cache.is_recurrent:\n        return 'no'\n"
        '    if runner.recorder is not None:\n        return "needs router',
        f"{INVARIANTS}/test_recurrent_graphs.py::"
        "test_a_captured_rollout_has_the_tokens_of_one_without_graphs",
    ),
    Mutant(
        "F1",
        "what is captured is not proved",
        f"{GRAPHS}/ladder.py",
        "            if not findings:",
        "            if True:",
        f"{INVARIANTS}/test_proof.py::"
        "test_a_planted_fault_ends_on_the_rung_without_it_and_one_warning_says_so",
        "shared and wrong",
    ),
    Mutant(
        "F2",
        "a graph whose capture failed is freed",
        f"{GRAPHS}/capture.py",
        "    _FAILED.append((graph, reason))\n    return",
        "    return",
        f"{TESTS}/cuda_graphs/test_capture.py::"
        "test_a_failed_capture_is_kept_for_ever_and_is_the_last_of_the_process",
    ),
    Mutant(
        "F2",
        "a trace that fails inside a capture is replaced there",
        f"{ENGINE}/attention/traced_forward.py",
        "if raises or is_out_of_memory(error):",
        "if is_out_of_memory(error):",
        f"{INVARIANTS}/test_compiled_decode.py::"
        "test_a_trace_that_fails_in_a_captured_step_is_raised_and_not_replaced_inside_the_capture",
    ),
    Mutant(
        "F3",
        "graphs share cuBLAS's workspaces with others",
        f"{GRAPHS}/capture.py",
        "    torch.clear_autocast_cache()\n    clear_cublas_workspaces()\n    try:",
        "    torch.clear_autocast_cache()\n    try:",
        f"{TESTS}/cuda_graphs/test_capture.py::test_a_graph_has_workspaces_of_its_own",
    ),
    Mutant(
        "F4",
        "cumulative sums are of floats",
        f"{ENGINE}/sampling/truncation.py",
        ".round().long().cumsum(-1)",
        ".cumsum(-1).round().long()",
        f"{PRETENDED}::test_full_determinism_gives_the_tokens_that_it_gives_without",
        "plain",
    ),
    Mutant(
        "F5",
        "a prompt's log-probabilities are computed on the thread's device",
        f"{ENGINE}/model/runner.py",
        "with devices.current(self.device), devices.plain_modes(), self.numerics():",
        "with devices.plain_modes(), self.numerics():",
        f"{PRETENDED}::test_no_forward_runs_while_another_device_is_the_threads_current_one",
        "prompt",
    ),
    Mutant(
        "F6",
        "a step that never ends is waited for",
        f"{GRAPHS}/graphs.py",
        "devices.wait_for(self._end, self._device, STEP_LIMIT_SECONDS, step)",
        "pass",
        f"{TESTS}/cuda_graphs/test_graphs.py::"
        "test_a_step_that_never_ends_is_an_error_that_says_what_to_set",
    ),
    Mutant(
        "F7",
        "every GPU is taken for one with units for float64",
        f"{ENGINE}/numerics/agreement.py",
        "return torch.cuda.get_device_capability(device) in FAST_DOUBLE_CAPABILITIES",
        "return True",
        "tests/numerics/test_agreement.py::"
        "test_a_long_forward_in_float64_is_for_cards_with_units_for_it",
    ),
    Mutant(
        "G1",
        "a failed capture leaves its marks on memory and random numbers of training",
        f"{GRAPHS}/capture.py",
        "leave_failed_capture(self._device, self._pool)",
        "pass",
        f"{TESTS}/cuda_graphs/test_capture.py::"
        "test_a_failed_capture_leaves_training_its_memory_and_its_random_numbers",
    ),
    Mutant(
        "G2",
        "graphs that are captured later run unproved",
        f"{GRAPHS}/decode_path.py",
        "if self._ladder is not None and self._ladder.is_due(self.graphs):",
        "if False:",
        f"{INVARIANTS}/test_proof.py::"
        "test_graphs_that_were_captured_before_memory_ran_out_are_proved",
    ),
    Mutant(
        "G3",
        "what a step leaves for the next one is not proved",
        f"{GRAPHS}/proof.py",
        "if left != (found.tokens, lengths, [1] * len(rows)):",
        "if False:",
        f"{INVARIANTS}/test_proof.py::test_a_fault_in_sampling_ends_without_graphs",
        "next",
    ),
    Mutant(
        "G4",
        "graphs of a replaced forward run unproved",
        f"{GRAPHS}/ladder.py",
        "if is_other_trace or captured_code(self._runner.model) != self._code:",
        "if is_other_trace:",
        f"{INVARIANTS}/test_proof.py::"
        "test_graphs_of_a_replaced_forward_are_proved_though_their_sizes_were",
    ),
    Mutant(
        "G5",
        "unused memory of graphs counts as free for training",
        f"{ENGINE}/memory/device.py",
        "unused = max(0, unused - unused_pool_bytes(device))",
        "unused = max(0, unused)",
        f"{TESTS}/memory/test_device.py::test_memory_of_graphs_is_not_free_for_training",
    ),
    Mutant(
        "G6",
        "a measurement of kept activations counts as the peak of training",
        "cb_rollout/integrations/trl/packed_loss.py",
        "            forget_peaks()\n            num_bytes",
        "            num_bytes",
        "tests/training/test_kept_activations.py::"
        "test_what_a_loss_compares_and_measures_is_no_part_of_the_peak_of_training",
    ),
)


def fails(tree: Path, mutant: Mutant) -> bool:
    """Return whether the mutant's test fails in this tree; raise if pytest ran none."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", mutant.test, *(["-k", mutant.only] if mutant.only else [])]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.test}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.returncode == 1


def outcome(tree: Path, mutant: Mutant) -> str:
    """Undo a mend, run its test, and restore the file; return what came of it."""
    path = tree / mutant.file
    source = path.read_text()
    if source.count(mutant.right) != 1:
        return f"{source.count(mutant.right)} places are {mutant.right!r}"
    try:
        path.write_text(source.replace(mutant.right, mutant.wrong))
        is_seen = fails(tree, mutant)
    finally:
        path.write_text(source)
    return "fails" if is_seen else "PASSES without its mend"


def main() -> None:
    """Print a row for each mutant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("findings", nargs="*", help="only mutants of these findings")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.findings or m.finding in options.findings]
    is_sound = True
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        unwanted = (".git", ".venv", ".compat", "build", "runs", "__pycache__")
        ignored = shutil.ignore_patterns(*unwanted)
        shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
        print("| finding | without its mend | test | it |", "|---|---|---|---|", sep="\n")
        for mutant in chosen:
            found = outcome(tree, mutant)
            is_sound &= found == "fails"
            name = mutant.test.rpartition("::")[2]
            print(f"| {mutant.finding} | {mutant.undone} | `{name}` | {found} |", flush=True)
    raise SystemExit(not is_sound)


if __name__ == "__main__":
    main()
