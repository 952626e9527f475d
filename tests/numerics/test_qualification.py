"""A verdict is found once a machine, kept for its user alone, and believed where it is whole."""

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from waiting import wait_until

from cb_rollout.compat.inductor import cache_folder
from cb_rollout.engine.numerics.qualification import qualifier, verdicts
from cb_rollout.engine.numerics.qualification.child import run_in_child
from cb_rollout.engine.numerics.qualification.qualifier import (
    Subject,
    UnprovedError,
    require_proved,
    trying_anew,
)
from cb_rollout.engine.numerics.qualification.verdicts import VerdictStore

OTHER_USER = 65534


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(qualifier.SWITCH, raising=False)
    qualifier.forget_trials()
    yield cache_folder("verdicts")
    qualifier.forget_trials()


def subject_of(tmp_path, trial="counts", **key):
    return Subject(
        name="a test",
        function=f"planted_trials:{trial}",
        argument={"file": str(tmp_path / "count")},
        key={"card": "none", **key},
        otherwise="nothing runs",
        limit_seconds=60,
    )


def num_trials(tmp_path):
    return len((tmp_path / "count").read_text())


def as_another_process():
    qualifier.forget_trials()


def verdict_file(folder):
    (file,) = folder.glob("*.json")
    return file


def test_a_verdict_is_kept_for_later_processes(tmp_path, folder, caplog):
    first = require_proved(subject_of(tmp_path))
    assert first.milliseconds == {"fast": 1.5, "slow": 3.0}
    assert not first.is_stored
    as_another_process()
    second = require_proved(subject_of(tmp_path))
    assert num_trials(tmp_path) == 1
    assert second == replace(first, is_stored=True)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(verdict_file(folder).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["card", "driver", "torch", "model"])
def test_another_key_has_a_trial_of_its_own(name, tmp_path):
    require_proved(subject_of(tmp_path))
    require_proved(subject_of(tmp_path, **{name: "another"}))
    assert num_trials(tmp_path) == 2


def truncated(file):
    file.write_bytes(file.read_bytes()[:-9])


def empty(file):
    file.write_bytes(b"")


def random_bytes(file):
    file.write_bytes(bytes(range(256)))


def of_another_key(file):
    found = json.loads(file.read_text())
    found["key"]["card"] = "another"
    file.write_text(json.dumps(found))


def with_another_fault_type(file):
    found = json.loads(file.read_text())
    found["verdict"]["fault"] = 0
    file.write_text(json.dumps(found))


def without_a_field(file):
    found = json.loads(file.read_text())
    del found["verdict"]["tried_at"]
    file.write_text(json.dumps(found))


def with_times_that_are_no_numbers(file):
    found = json.loads(file.read_text())
    found["verdict"]["milliseconds"] = ["fast"]
    file.write_text(json.dumps(found))


def of_the_far_future(file):
    found = json.loads(file.read_text())
    found["verdict"]["tried_at"] = 1e300
    file.write_text(json.dumps(found))


def a_list(file):
    file.write_text("[1]")


def far_too_long(file):
    file.write_text(file.read_text() + " " * verdicts.MOST_BYTES)


def writable_by_others(file):
    file.chmod(0o666)


def of_another_user(file):
    if os.geteuid():
        pytest.skip("needs root")
    os.chown(file, OTHER_USER, OTHER_USER)


def a_link(file):
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def a_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        *(truncated, empty, random_bytes, of_another_key, with_another_fault_type, a_list),
        *(without_a_field, with_times_that_are_no_numbers, far_too_long, writable_by_others),
        *(of_another_user, a_link, a_pipe, a_folder, of_the_far_future),
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_verdict_is_ignored_and_found_anew_with_one_line(
    damage, tmp_path, folder, caplog
):
    subject = subject_of(tmp_path)
    require_proved(subject)
    damage(verdict_file(folder))
    as_another_process()
    assert not require_proved(subject).is_stored
    assert num_trials(tmp_path) == 2
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "is unusable, so its trial runs again" in lines[0]
    if damage is a_folder:
        # It stays in the way.
        assert "kept for this process only" in lines[1]
        return
    assert len(lines) == 1
    as_another_process()
    assert require_proved(subject).is_stored


def test_without_a_folder_of_the_user_a_verdict_is_kept_for_the_process(tmp_path, folder, caplog):
    folder.parent.chmod(0o777)
    require_proved(subject_of(tmp_path))
    require_proved(subject_of(tmp_path))
    assert num_trials(tmp_path) == 1
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "kept for this process only" in line


def test_a_trial_that_ran_out_of_time_is_made_again_a_day_later(tmp_path, folder):
    hanging = replace(subject_of(tmp_path, "counts_and_hangs"), limit_seconds=2)
    for _ in range(2):
        with pytest.raises(UnprovedError, match="did not end within 2 s"):
            require_proved(hanging)
        as_another_process()
    assert num_trials(tmp_path) == 1
    found = json.loads(verdict_file(folder).read_text())
    found["verdict"]["tried_at"] -= verdicts.SECONDS_OF_A_TIMEOUT
    verdict_file(folder).write_text(json.dumps(found))
    # The machine is less busy now.
    assert require_proved(replace(hanging, function="planted_trials:counts")).fault == ""


def test_a_trial_that_could_not_be_had_is_not_kept(tmp_path, folder, caplog):
    for _ in range(2):
        with pytest.raises(
            UnprovedError, match="could not be tried, a child process had no memory"
        ):
            require_proved(subject_of(tmp_path, "runs_out_of_memory"))
        assert not list(folder.glob("*.json"))
    # It is not tried twice by one process.
    assert num_trials(tmp_path) == 1
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("function", ["no_such_module:trial", "planted_trials:no_such_trial"])
def test_a_trial_that_cannot_be_imported_says_so(function):
    result = run_in_child(function, {}, limit_seconds=60)
    assert "no_such" in result.obstacle
    assert not result.fault


def test_what_was_found_before_is_tried_anew_where_that_is_asked(tmp_path):
    subject = subject_of(tmp_path)
    require_proved(subject)
    with trying_anew():
        assert not require_proved(subject).is_stored
        require_proved(subject)
    assert num_trials(tmp_path) == 2
    as_another_process()
    assert require_proved(subject).is_stored


def test_a_child_gets_neither_the_parents_main_nor_its_standard_output(tmp_path, capfd):
    script = tmp_path / "script.py"
    # Without `if __name__ == "__main__"`, as many training scripts are.
    script.write_text(
        "from cb_rollout.engine.numerics.qualification.child import run_in_child\n"
        "print('main runs')\n"
        "print(run_in_child('planted_trials:prints', {}, limit_seconds=60).answer)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
    assert capfd.readouterr().out == "main runs\nanswered\n"


HOLDER = """
import sys
from cb_rollout.engine.numerics.qualification.verdicts import VerdictStore
with VerdictStore().locked({"card": "none"}, 0) as has_lock:
    print(has_lock, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """A process that holds the lock of a verdict."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, **pipes) as process:
        assert process.stdout.readline() == b"True\n"
        yield process
        process.kill()


def test_a_living_owners_lock_is_waited_for_no_longer_than_the_limit(tmp_path, holder):
    with VerdictStore().locked({"card": "none"}, 0.1) as has_lock:
        assert not has_lock
    # The lock of another verdict is free.
    with VerdictStore().locked({"card": "another"}, 0) as has_lock:
        assert has_lock
    # A trial made twice harms nothing.
    assert require_proved(replace(subject_of(tmp_path), limit_seconds=5)).fault == ""


def test_a_dead_owners_lock_does_not_block(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with VerdictStore().locked({"card": "none"}, 0) as has_lock:
        assert has_lock
    assert require_proved(subject_of(tmp_path)).fault == ""


ASKING = """
import sys
import planted_trials
from cb_rollout.engine.numerics.qualification.qualifier import Subject, require_proved
subject = Subject(name="a test", function="planted_trials:counts", argument={"file": sys.argv[1]},
    key={"card": "none"}, otherwise="nothing runs", limit_seconds=60)
print(require_proved(subject).is_stored)
"""


@pytest.mark.slow
def test_of_several_processes_one_tries_and_the_others_read(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ASKING, str(tmp_path / "count")]
    asking = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate()[0].strip() for process in asking]
    assert sorted(answers) == ["False", "True", "True"]
    assert num_trials(tmp_path) == 1


def test_an_interrupted_parent_kills_its_child(tmp_path, monkeypatch):
    file = tmp_path / "count"

    class Interrupted(subprocess.Popen):
        def communicate(self, *arguments):
            self.stdin.write(arguments[0])
            self.stdin.close()
            wait_until(file.exists)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_child("planted_trials:counts_and_hangs", {"file": str(file)}, limit_seconds=60)
