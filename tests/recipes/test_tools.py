"""The tool and multi-turn recipes: their rewards, and two steps each through their own code."""

import random
import sys
import warnings
from pathlib import Path

import arithmetic_tool_cpu
import multi_turn_grpo
import pytest
import tools_grpo
import trl
from accelerate.state import AcceleratorState, PartialState
from launching import write_questions
from tiny import char_tokenizer, tiny_model

SCHEMA = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"


@pytest.fixture
def checkpoint(tmp_path):
    """Save a tiny model whose chat template has Qwen3's tool format."""
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = SCHEMA.read_text()
    tokenizer.save_pretrained(tmp_path / "model")
    model = tiny_model(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=4096
    )
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def run(monkeypatch, capsys):
    def run_main(recipe, *arguments):
        monkeypatch.setattr(sys, "argv", [recipe.__name__, *map(str, arguments)])
        try:
            # transformers and trl warn about each other, which no recipe can change.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recipe.main()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState._reset_state()
        return capsys.readouterr().out.strip().splitlines()

    return run_main


@pytest.mark.slow
def test_the_tool_demo_runs_two_steps_and_ends_with_its_figures(run, tmp_path):
    lines = run(
        arithmetic_tool_cpu,
        *("--warmup-steps", 2, "--max-steps", 2, "--output-dir", tmp_path / "run"),
    )
    assert lines[-2].startswith("right answers ")
    before, after = lines[-1].removeprefix("calls per answer").split("->")
    assert float(before) >= 0
    assert float(after) >= 0


def test_only_a_copied_result_is_rewarded():
    def turns(*contents):
        return [{"role": role, "content": content} for role, content in contents]

    called = turns(("assistant", ""), ("tool", "1702"), ("assistant", "1702"))
    broken_off = turns(("assistant", ""), ("tool", "1702"))
    wrong = turns(("assistant", "1700"))
    rewards = arithmetic_tool_cpu.reward([called, broken_off, wrong], ["1702"] * 3)
    assert rewards == [1.0, 0.0, 0.0]


def test_a_call_is_read_out_of_its_tokens_and_rendered_to_the_same():
    tokenizer = arithmetic_tool_cpu.create_tokenizer()
    product = arithmetic_tool_cpu.draw_product(random.Random(0))
    prompt = [{"role": "user", "content": product}]
    prefix = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    ids = tokenizer(f"<calculate x={product}/><eos>")["input_ids"]
    message = tokenizer.parse_response(ids, prefix=prefix)
    call = message["tool_calls"][0]["function"]
    assert call == {"name": "calculate", "arguments": {"x": product}}
    rendered = tokenizer.apply_chat_template([*prompt, {"content": "", **message}])["input_ids"]
    assert rendered == prefix + ids


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(3 + 4) * 12", "84"), ("-7 / 2", "-3.5"), ("2*-3", "-6"), ("1000000*3", "3e+06")],
)
def test_the_calculator_works_out_arithmetic(expression, value):
    assert tools_grpo.calculate(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "2**9", "x", "'a'*9"])
def test_the_calculator_does_nothing_else(expression):
    with pytest.raises(ValueError, match="is not arithmetic"):
        tools_grpo.calculate(expression)


@pytest.mark.slow
def test_tools_run_two_steps_on_a_local_checkpoint(run, checkpoint, tmp_path):
    lines = run(
        tools_grpo,
        *("--model", checkpoint, "--dataset", write_questions(tmp_path / "train.jsonl")),
        *("--output-dir", tmp_path / "run", "--max-steps", 2, "--batch-size", 8),
        *("--num-generations", 4, "--max-completion-length", 16),
    )
    assert lines[-1].startswith("report ")
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_game_is_played_for_two_steps_on_a_local_checkpoint(run, checkpoint, tmp_path):
    lines = run(
        multi_turn_grpo,
        *("--model", checkpoint, "--output-dir", tmp_path / "run", "--max-steps", 2),
        *("--batch-size", 8, "--num-generations", 4, "--max-completion-length", 16),
    )
    assert lines[-1].startswith("report ")


@pytest.mark.slow
def test_an_environment_of_gymnasium_is_walked_for_two_steps(run, checkpoint, tmp_path):
    pytest.importorskip("gymnasium", reason="needs `pip install gymnasium`")
    import gymnasium_grpo

    walk = gymnasium_grpo.FrozenLake()
    assert walk.reset(seed=3) == "\n@FFF\nFHFH\nFFFH\nHFFG\n"
    for direction in ("down", "down", "right", "down", "right"):
        assert "over" not in walk.move(direction)
    assert walk.get_reward() == 0
    assert walk.move("right").endswith("the walk is over")
    assert walk.get_reward() == 1
    lines = run(
        gymnasium_grpo,
        *("--model", checkpoint, "--output-dir", tmp_path / "run", "--max-steps", 2),
        *("--batch-size", 4, "--num-generations", 2, "--max-completion-length", 16),
    )
    assert lines[-1].startswith("report ")


def test_games_on_an_openenv_server_have_sessions_of_their_own_and_run_two_steps(
    run, checkpoint, tmp_path
):
    pytest.importorskip("openenv.core", reason="needs `pip install openenv-core`")
    import openenv_grpo

    with openenv_grpo.served_game() as url:
        games = [openenv_grpo.Game(url) for _ in range(2)]
        secrets = [random.Random(seed).randint(1, 100) for seed in (3, 5)]
        assert secrets[0] != secrets[1]
        for game, seed in zip(games, (3, 5), strict=True):
            game.reset(seed=seed)
        assert games[0].guess(0) == "higher"
        assert [game.guess(n) for game, n in zip(games, secrets, strict=True)] == ["correct"] * 2
        assert [game.get_reward() for game in games] == [0.8, 0.9]
        assert games[0].guess(1) == "the game is over"
        lines = run(
            openenv_grpo,
            *("--model", checkpoint, "--output-dir", tmp_path / "run", "--max-steps", 2),
            *("--batch-size", 4, "--num-generations", 2, "--max-completion-length", 16),
            *("--url", url),
        )
    assert lines[-1].startswith("report ")


def test_a_game_answers_and_rewards_fewer_guesses_more():
    game = multi_turn_grpo.GuessingGame()
    game.reset(secret=40)
    assert game.get_reward() == 0.0
    assert game.guess(50) == "lower"
    assert game.get_reward() == pytest.approx(0.9)
    assert game.guess(30) == "higher"
    assert game.guess(40) == "right"
    after_three = game.get_reward()
    assert game.guess(40) == "the game is over"
    game.reset(secret=40)
    game.guess(40)
    assert game.get_reward() == 2.0 > after_three > 1.0
