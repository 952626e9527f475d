"""A rollout's progress bar: where it is shown, what it says, and that no stream harms a rollout."""

import io
import sys
from types import SimpleNamespace

import pytest
from tiny import char_tokenizer, tiny_model
from tiny_trainer import logged, tiny_trainer

import cb_rollout
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.rollout.generator import generate_batch

PROMPTS = [[5, 6, 7], [8, 9]]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and keeps every line that was drawn."""

    def isatty(self):
        return True

    def drawn(self):
        return [line for line in self.getvalue().replace("\n", "\r").split("\r") if "seq" in line]


class BrokenPipe(Terminal):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class Closed(Terminal):
    """A terminal that is closed once it has been found to be one."""

    def write(self, *_):
        raise ValueError("I/O operation on closed file.")

    flush = write


def sample(**options):
    config = RolloutConfig(num_blocks=64, seed=3)
    with RolloutGenerator(tiny_model(), config, tokenizer=char_tokenizer()) as generator:
        outputs = generator.generate_batch(
            PROMPTS, sampling_params=PARAMS, num_return_sequences=2, **options
        )
    return [output.generated_tokens for output in outputs.values()]


def shown(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_the_bar_counts_sequences_and_tokens_and_stays(monkeypatch):
    terminal = shown(monkeypatch, Terminal())
    sample(progress_bar=True)
    last = terminal.drawn()[-1]
    assert "4/4" in last
    assert "longest=6" in last
    assert "tokens/s=" in last
    assert "tokens/s=0" not in last


def test_a_person_sees_a_bar_by_itself_and_the_screen_is_clean_at_the_end(monkeypatch):
    terminal = shown(monkeypatch, Terminal())
    sample(progress_bar=None)
    assert "0/4" in terminal.drawn()[0]
    *_, erased, end = terminal.getvalue().split("\r")
    assert not erased.strip()
    assert not end


def test_a_file_gets_no_bar_unless_it_is_asked_for(monkeypatch):
    log = shown(monkeypatch, io.StringIO())
    sample(progress_bar=None)
    assert not log.getvalue()
    sample(progress_bar=True)
    assert "4/4" in log.getvalue()


def test_a_notebook_gets_a_bar_though_its_stream_is_no_terminal(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    output = shown(monkeypatch, io.StringIO())
    sample(progress_bar=None)
    assert "0/4" in output.getvalue()


@pytest.mark.fast_cases("closed before-None")
@pytest.mark.parametrize("progress_bar", [None, True])
@pytest.mark.parametrize("stream", [BrokenPipe, Closed, lambda: None, "closed before"])
def test_a_stream_that_takes_nothing_changes_no_token(monkeypatch, stream, progress_bar):
    wanted = sample()
    stream = Terminal() if stream == "closed before" else stream()
    if type(stream) is Terminal:
        stream.close()
    shown(monkeypatch, stream)
    assert sample(progress_bar=progress_bar) == wanted


def test_the_function_shows_a_bar_unless_told_not_to(monkeypatch):
    log = shown(monkeypatch, io.StringIO())
    for shows, options in ((True, {}), (False, {"progress_bar": False})):
        log.seek(0)
        log.truncate()
        generate_batch(tiny_model(), PROMPTS, sampling_params=PARAMS, **options)
        assert ("2/2" in log.getvalue()) is shows


def trained_on(terminal, monkeypatch, tmp_path, *, is_main=True, **settings):
    shown(monkeypatch, terminal)
    trainer = tiny_trainer(tmp_path, max_steps=1, **settings)
    if not is_main:
        trainer.accelerator = SecondProcess(trainer.accelerator)
    with cb_rollout.attach(trainer):
        trainer.train()
    assert len(logged(trainer, "reward")) == 1
    return [line for line in terminal.drawn() if "rollout" in line]


class SecondProcess:
    """An accelerator that is not the main process's."""

    is_main_process = False

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)


def test_an_attached_trainer_shows_its_rollouts_to_a_person(monkeypatch, tmp_path):
    drawn = trained_on(Terminal(), monkeypatch, tmp_path, disable_tqdm=False)
    assert "0/16" in drawn[0]
    assert "longest=" in drawn[-1]


@pytest.mark.fast_cases("disable_tqdm")
@pytest.mark.parametrize(
    ("terminal", "settings"),
    [
        (Terminal, {"disable_tqdm": True}),
        (Terminal, {"disable_tqdm": False, "is_main": False}),
        (type("Log", (Terminal,), {"isatty": lambda self: False}), {"disable_tqdm": False}),
    ],
    ids=["disable_tqdm", "another process", "a file"],
)
def test_nobody_else_gets_a_bar(monkeypatch, tmp_path, terminal, settings):
    assert not trained_on(terminal(), monkeypatch, tmp_path, **settings)
