"""Facts about the nodes of FX graphs, against what a rank records of the same code."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from overlaplab.cluster.virtual import run_virtual
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.operators import node_facts, tensor_bytes

functional = torch.ops._c10d_functional


def facts_of(fn, *args, mode="fake"):
    """Names of nodes to their facts."""
    graph = make_fx(fn, tracing_mode=mode)(*args).graph
    return {node.name: node_facts(node) for node in graph.nodes}


def names(nodes):
    return [node.name for node in nodes]


def gradients(model, *inputs):
    """A step as a function of parameters and inputs, for `make_fx`."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def step(tensors, inputs):
        loss = torch.func.functional_call(model, tensors, inputs).sum()
        return torch.autograd.grad(
            loss, [t for t in tensors.values() if t.requires_grad]
        )

    return step, tensors, inputs


def transformer():
    config = TransformerConfig(num_layers=1, d_model=16, num_heads=2, vocab_size=32)
    return Transformer(config), torch.zeros(2, 8, dtype=torch.int64)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)
    ), torch.ones(2, 2, 6, 6)


@pytest.fixture(scope="module", params=[transformer, convolutions])
def both(request):
    """One step as a graph and as the record of a rank that runs this graph."""
    model, data = request.param()
    model(data)  # lazy ones
    step, tensors, inputs = gradients(model, data)
    graph = make_fx(step, tracing_mode="fake")(tensors, inputs)
    # The rank runs the graph's own nodes: what eager mode would do is not the question.
    _, program = run_virtual(graph, (tensors, inputs), world_size=1, fake=True)
    found = [node_facts(node) for node in graph.graph.nodes]
    return [f for f in found if f.operator.records], program.ranks[0]


def test_a_graph_launches_what_a_rank_records_of_it(both):
    nodes, ops = both
    assert [f.operator.name for f in nodes] == [op.name for op in ops]


def test_bytes_and_operations_of_nodes_are_those_of_the_record(both):
    nodes, ops = both
    assert [(f.read_bytes, f.write_bytes) for f in nodes] == [
        (op.read_bytes, op.write_bytes) for op in ops
    ]
    assert [f.flops for f in nodes] == [op.flops for op in ops]
    assert sum(f.flops for f in nodes) > 0


def test_views_launch_nothing_and_alias_what_they_show():
    def fn(x):
        first, second = x.view(4, 4).t().split(2)
        return first + 1, second.expand(3, 2, 4)

    facts = facts_of(fn, torch.ones(16))
    for view, source in [
        *(("view", "x_1"), ("t", "view"), ("split", "t"), ("getitem", "split")),
        *(("getitem_1", "split"), ("expand", "getitem_1")),
    ]:
        one = facts[view]
        assert names(one.aliases) == [source]
        assert (one.reads, one.write_bytes, one.operator.records) == ((), 0, False)
    assert facts["add"].aliases == ()


def test_what_is_expanded_lies_in_memory_once():
    x = torch.ones(4, 1)
    assert tensor_bytes(x.expand(4, 100)) == tensor_bytes(x) == 16
    assert tensor_bytes(torch.ones(0, 3)) == 0


def test_in_place_writes_name_the_node_that_changes():
    facts = facts_of(lambda x, y: x[0].add_(y).mul(2), torch.ones(3, 4), torch.ones(4))
    assert names(facts["add_"].writes) == ["select"]
    assert names(facts["add_"].aliases) == ["select"]
    assert names(facts["add_"].reads) == ["select", "y_1"]
    assert names(facts["select"].aliases) == ["x_1"]
    assert facts["add_"].write_bytes == 16
    assert facts["mul"].writes == ()


def test_collectives_read_what_they_send_and_their_wait_is_a_view():
    def fn(x):
        sent = functional.all_reduce_coalesced([x, x + 1], "sum", "group")
        return [functional.wait_tensor(one) for one in sent]

    facts = facts_of(fn, torch.ones(4))
    sent = facts["all_reduce_coalesced"]
    assert sent.operator.is_collective
    assert names(sent.reads) == ["x_1", "add"]
    assert names(facts["wait_tensor"].aliases) == ["getitem"]


def test_a_node_draws_where_it_drops():
    def attend(dropout):
        return lambda q: torch.nn.functional.scaled_dot_product_attention(
            q, q, q, dropout_p=dropout
        )

    q = torch.ones(1, 1, 4, 8)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert not facts_of(attend(0.0), q)[attention].draws
    assert any(f.draws for f in facts_of(attend(0.5), q).values())
    facts = facts_of(lambda x: torch.bernoulli(x, 0.5) * x, torch.ones(4))
    assert [n for n, f in facts.items() if f.draws] == ["bernoulli"]


def test_symbols_count_as_what_was_traced():
    facts = facts_of(torch.mm, torch.ones(3, 5), torch.ones(5, 7), mode="symbolic")
    mm = facts["mm"]
    assert (mm.flops, mm.read_bytes, mm.write_bytes) == (210, 4 * (15 + 35), 4 * 21)


def test_a_graph_without_values_is_refused():
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    with pytest.raises(ValueError, match=r"node 'add'.*|node 'x'.*FakeTensorProp"):
        for node in graph.nodes:
            node_facts(node)
