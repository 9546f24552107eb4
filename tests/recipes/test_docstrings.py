"""The examples in the recipes' own docstrings hold."""

import doctest

import pytest

from sublayer.recipes import FAMILIES, family


@pytest.mark.parametrize("name", FAMILIES)
def test_the_example_of_a_recipe_holds(name: str) -> None:
    found = doctest.testmod(family(name))
    assert found.attempted > 0
    assert found.failed == 0
