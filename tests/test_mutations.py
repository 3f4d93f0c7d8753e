"""The mutations of `tests/mutations.py` replace functions of the code as it is."""

import pytest

from tests import mutations


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_mutation_replaces_a_function_of_the_code(name, monkeypatch):
    replaced = []
    monkeypatch.setattr(mutations, "setattr", lambda *new: replaced.append(new), raising=False)
    mutations.apply(name)
    ((owner, attribute, wrong),) = replaced
    assert wrong is not getattr(owner, attribute)
