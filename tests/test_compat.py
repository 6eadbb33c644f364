"""What parplan expects of PyTorch beyond its documentation; a new release that changes it fails here."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parplan.compat import memory_of, overload_name, pytree, schema_of


def test_trees_come_apart_and_together() -> None:
    tree = ((1, {"a": [2, None]}), {"b": 3})
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == [1, 2, None, 3]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_flatten(tree)[1] == spec
    assert pytree.tree_leaves(tree) == leaves
    assert pytree.tree_map(lambda leaf: leaf and leaf + 1, tree) == ((2, {"a": [3, None]}), {"b": 4})


def test_ops_have_schemas() -> None:
    schema = schema_of(torch.ops.aten.linear.default)
    assert schema.name == "aten::linear"
    assert [argument.name for argument in schema.arguments] == ["input", "weight", "bias"]
    assert [argument.has_default_value() for argument in schema.arguments] == [False, False, True]
    assert isinstance(schema.arguments[2].type, torch.OptionalType)
    assert not schema.is_mutable
    assert schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert overload_name(torch.ops.aten.add_.Tensor) == "Tensor"
    assert schema_of(len) is None


def test_views_share_memory_and_copies_do_not() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
        assert memory_of(fake) == memory_of(fake[1:])
        assert memory_of(fake) != memory_of(torch.zeros(4))
    real = torch.zeros(4)
    assert memory_of(real) == memory_of(real.view(2, 2))
    assert memory_of(real) != memory_of(real.clone())
