"""A launch of several processes of which each trains alone is refused."""

import pytest
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from tiny import tiny_model

from cb_rollout import ConfigurationError, RolloutGenerator
from cb_rollout.compat.accelerate import require_launched_together

LAUNCHER = ("ACCELERATE_USE_CPU", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK")
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def launched_by_nothing(monkeypatch):
    for name in (*LAUNCHER, *SIZES):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def launch(monkeypatch, *options):
    """Set what accelerate's own launcher sets for a script that it starts as one process."""
    given = launch_command_parser().parse_args([*options, "--num_machines", "1", "script.py"])
    args, *_ = _validate_launch_command(given)
    _, environment = prepare_simple_launcher_cmd_env(args)
    for name in LAUNCHER:
        if name in environment:
            monkeypatch.setenv(name, environment[name])


@pytest.mark.parametrize("options", [("--cpu",), ()])
@pytest.mark.parametrize("number", ["2", "3"])
def test_a_number_of_processes_that_accelerate_dropped_is_refused(monkeypatch, options, number):
    launch(monkeypatch, *options, "--num_processes", number)
    with pytest.raises(ConfigurationError, match="torchrun --nproc-per-node 2 SCRIPT"):
        require_launched_together(1)


@pytest.mark.parametrize("options", [("--cpu",), ()])
def test_one_process_that_was_asked_for_is_taken(monkeypatch, options):
    launch(monkeypatch, *options, "--num_processes", "1")
    require_launched_together(1)


def test_a_process_of_no_launcher_is_taken():
    require_launched_together(1)


@pytest.mark.parametrize("name", SIZES)
def test_a_launcher_that_says_its_number_of_one_is_taken(monkeypatch, name):
    launch(monkeypatch, "--cpu", "--num_processes", "2")
    monkeypatch.setenv(name, "1")
    require_launched_together(1)


def test_an_address_alone_is_no_launch_of_accelerate(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    require_launched_together(1)


def test_processes_that_each_count_themselves_alone_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match=r"started 4 processes .*sees only 1.*cpu=True"):
        require_launched_together(1)


def test_processes_that_are_all_counted_are_taken(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    require_launched_together(4)


def test_a_generator_refuses_such_a_launch(monkeypatch):
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    launch(monkeypatch, "--cpu", "--num_processes", "2")
    with pytest.raises(ConfigurationError, match="started only this one"):
        RolloutGenerator(tiny_model(), accelerator=accelerator)
