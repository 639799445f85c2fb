"""Which modules become units, and what no unit has to itself."""

from __future__ import annotations

import pytest
from torch import nn

from overlaplab.models import TOY_NETS, Transformer, TransformerConfig
from overlaplab.techniques.model_facts import ParameterInfo
from overlaplab.techniques.zero.units import make_units
from tests.techniques.zero.programs import Blocks, SharedRows


def units_of(model, given=None):
    infos = [
        ParameterInfo(i, name, p, p.stride(), True)
        for i, (name, p) in enumerate(model.named_parameters())
    ]
    units = make_units(model, infos, given)
    assert sum(len(unit.parameters) for unit in units) == len(infos)
    return {unit.name: [info.name for info in unit.parameters] for unit in units}


def linear():
    return nn.Linear(2, 2, bias=False)


def test_blocks_that_repeat_are_units_and_so_are_large_layers_beside_them():
    found = units_of(Transformer(TransformerConfig(num_layers=2)))  # 256 x 64
    assert list(found) == ["embedding", "blocks.0", "blocks.1", "head", "(rest)"]
    assert found["(rest)"] == ["norm.weight", "norm.bias"]


def test_layers_beside_blocks_that_are_small_are_in_the_rest():
    found = units_of(Transformer(TransformerConfig(num_layers=2, vocab_size=99)))
    assert list(found) == ["blocks.0", "blocks.1", "(rest)"]
    assert found["(rest)"] == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]


def test_a_large_layer_that_shares_its_weight_is_in_the_rest():
    found = units_of(Transformer(TransformerConfig(num_layers=2, tied=True)))
    assert list(found) == ["blocks.0", "blocks.1", "(rest)"]
    assert found["(rest)"][0] == "embedding.weight"


def test_members_that_do_not_repeat_are_in_the_rest_where_they_are_small():
    net = nn.Sequential(linear(), nn.Tanh(), linear(), nn.PReLU())  # 4, 4, 1 numbers
    assert list(units_of(net)) == ["0", "2", "3"]
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(2, 3), nn.PReLU())
    assert list(units_of(net)) == ["0", "2", "(rest)"]


def test_blocks_inside_a_block_are_part_of_it():
    net = nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(2)))
    assert units_of(net) == {
        "0": ["0.0.weight", "0.1.weight"],
        "1": ["1.0.weight", "1.1.weight"],
    }


def test_a_block_that_is_there_twice_is_one_unit():
    one = linear()
    assert list(units_of(nn.Sequential(one, linear(), one))) == ["0", "1"]


def test_a_weight_that_two_units_share_is_in_the_rest():
    model = SharedRows()
    given = [model.embedding, model.middle, model.head]
    assert units_of(model, given) == {
        "middle": ["middle.weight", "middle.bias"],
        "(rest)": ["embedding.weight"],
    }


def test_without_blocks_everything_is_the_rest():
    assert list(units_of(TOY_NETS["branches"].make_model())) == ["(rest)"]
    assert list(units_of(Blocks(), [])) == ["(rest)"]


def test_given_units_are_taken_in_the_models_order():
    model = Blocks()
    given = [model.head, model.layers[2]]
    assert list(units_of(model, given)) == ["layers.2", "head", "(rest)"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda m: ["layers.0"], TypeError, r"units\[0\] is a str; expected a module"),
        (lambda m: [m.head, nn.Tanh()], ValueError, r"units\[1\], a Tanh, is not a"),
        (lambda m: [m], ValueError, r"units\[0\], a Blocks, is not a module inside"),
        (lambda m: [m.head, m.head], ValueError, "unit head is given twice"),
        (
            lambda m: [m.layers, m.layers[1]],
            ValueError,
            "unit layers.1 is inside unit layers",
        ),
    ],
)
def test_units_that_cannot_be_are_refused_by_name(given, error, message):
    model = Blocks()
    with pytest.raises(error, match=message):
        units_of(model, given(model))
