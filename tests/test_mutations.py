"""The mutations of `tests/mutations.py` apply to the code as it is."""

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_text_that_a_mutation_replaces_exists(name):
    path, correct, wrong = MUTATIONS[name]
    assert (ROOT / path).read_text().count(correct) == 1 and wrong not in (ROOT / path).read_text()
