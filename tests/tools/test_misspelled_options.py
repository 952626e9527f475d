import pytest

from cb_rollout.tools.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--modle", "m"], "generate has no option --modle; did you mean '--model'?"),
        (["generate", "--max-new-token=4", "--x-y"], None),
        (["generate", "--max-tokn=4"], "did you mean '--max-new-tokens'?"),
        (
            ["report", "out", "--tracee"],
            "report has no option --tracee; did you mean '--trace'?",
        ),
        (["report", "out", "--zzz"], "report has no option --zzz; see cb-rollout report --help."),
        (["doctor", "--modell", "m"], "did you mean '--model'?"),
    ],
)
def test_a_misspelled_option_is_answered_with_the_nearest_one(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("cb-rollout: ")
    assert errors.count("\n") == 1
    assert said is None or said in errors


def test_the_beginning_of_an_option_and_what_follows_two_dashes_are_taken(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", "--", "--trace-of-nothing", "--other", "--third"])
    assert "has no option" not in capsys.readouterr().err
    assert ended.value.code == 2
