"""The examples in the docstrings of every module of numerics."""

import doctest
import importlib
import pkgutil

import pytest

from halfulp import numerics

MODULES = [module.name for module in pkgutil.iter_modules(numerics.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"halfulp.numerics.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0


def test_every_public_name_is_described():
    assert len(MODULES) > 8
    examples = 0
    for name in numerics.__all__:
        thing = getattr(numerics, name)
        if callable(thing):
            assert thing.__doc__, name
            assert not thing.__doc__.startswith(f"{name}("), f"{name} has only a generated docstring"
            examples += ">>>" in thing.__doc__
    assert examples >= 10
