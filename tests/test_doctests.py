"""The examples in the docstrings, all of them."""

import doctest
import importlib
import pkgutil

import pytest


def modules():
    yield "halfulp"
    for package in ("numerics", "compress", "eval", "recipes"):
        home = importlib.import_module(f"halfulp.{package}")
        yield home.__name__
        yield from (info.name for info in pkgutil.walk_packages(home.__path__, f"{home.__name__}."))


@pytest.mark.parametrize("name", list(modules()))
def test_the_examples_of_a_module(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("package", ["numerics", "compress", "eval", "recipes"])
def test_every_public_name_is_described(package):
    home = importlib.import_module(f"halfulp.{package}")
    for name in home.__all__:
        thing = getattr(home, name)
        if callable(thing):
            assert thing.__doc__, name
            assert not thing.__doc__.startswith(f"{name}("), f"{name} has only a generated docstring"


def test_examples_are_found():
    """The first test can fail: there are examples to run."""
    found = doctest.DocTestFinder().find(importlib.import_module("halfulp.numerics._cast"))
    assert sum(len(test.examples) for test in found) >= 10
