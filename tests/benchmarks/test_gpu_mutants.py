"""Mends of the GPU path stand where `scripts/gpu/mutants.py` undoes them."""

import re

import pytest

from gpu import mutants
from gpu.mutants import MUTANTS, ROOT, Mutant

DECISION = ROOT / "docs/decisions/0042-a-mend-of-the-gpu-path-is-held-by-a-mutant.md"
FINDINGS = {
    *(f"A{number}" for number in range(1, 6)),
    *(f"B{number}" for number in range(1, 7)),
    *(f"C{number}" for number in range(1, 13)),
    *(f"N{number}" for number in range(1, 12)),
    *(f"F{number}" for number in range(1, 8)),
    *(f"G{number}" for number in range(1, 7)),
}


def test_each_finding_has_a_mutant_and_each_mutant_its_place_and_its_test():
    assert {finding for m in MUTANTS for finding in m.finding.split(", ")} == FINDINGS
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.right) == 1, mutant
        file, _, function = mutant.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), mutant


def test_the_decision_lists_every_mutant():
    listed = re.findall(
        r"^\| ([A-Z]\d.*) \| (.+) \| `(\w.*)` \| fails \|$", DECISION.read_text(), re.M
    )
    assert listed == [(m.finding, m.undone, m.test.rpartition("::")[2]) for m in MUTANTS]


@pytest.mark.parametrize(
    ("wrong", "said"), [("return 2", "fails"), ("return 1  # the same", "PASSES without its mend")]
)
def test_a_mutant_that_its_test_does_not_see_is_reported(wrong, said, tmp_path):
    (tmp_path / "code_under_test.py").write_text("def one():\n    return 1\n")
    test = "from code_under_test import one\n\n\ndef test_one():\n    assert one() == 1\n"
    (tmp_path / "test_one.py").write_text(test)
    mutant = Mutant("X", "two", "code_under_test.py", "return 1", wrong, "test_one.py::test_one")
    assert mutants.outcome(tmp_path, mutant) == said
    assert "return 1\n" in (tmp_path / "code_under_test.py").read_text()
    gone = mutant._replace(right="return 3")
    assert mutants.outcome(tmp_path, gone) == "0 places are 'return 3'"
