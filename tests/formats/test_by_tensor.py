"""Values of tensors, found by the tensor object."""

from __future__ import annotations

import torch

from graphfuse.formats.by_tensor import ByTensor


def test_a_value_lives_as_long_as_its_tensor() -> None:
    known: ByTensor[str] = ByTensor()
    one, two = torch.zeros(3), torch.zeros(3)
    known[one], known[two] = "one", "two"
    known[two] = "more"
    assert (known.get(one), known.get(two), sorted(known.values())) == ("one", "more", ["more", "one"])
    assert known.get(one.detach()) is None and known.get(one[:]) is None  # other objects
    del two
    assert list(known.values()) == ["one"]
    known.clear()
    assert known.get(one) is None


def test_a_tensor_in_the_place_of_another_has_no_value() -> None:
    known: ByTensor[int] = ByTensor()
    places = set()
    for number in range(100):  # of which most get the address of the one before
        tensor = torch.zeros(1)
        places.add(id(tensor))
        assert known.get(tensor) is None
        known[tensor] = number
        assert known.get(tensor) == number
        del tensor
    assert len(places) < 100 and not list(known.values())


def test_autograd_may_be_all_that_holds_a_tensor() -> None:
    known: ByTensor[str] = ByTensor()
    weight = torch.ones(3, requires_grad=True)
    kept = torch.arange(3.0)
    known[kept] = "kept"
    product = weight * kept
    del kept  # its Python object lives on in the graph
    (saved,) = [one for one in (product.grad_fn._saved_other, product.grad_fn._saved_self) if one is not None]
    assert known.get(saved) == "kept"
    del saved
    product.sum().backward()
    del product
    assert not list(known.values())
