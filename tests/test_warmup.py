"""warmup builds all that a step needs, and leaves nothing else behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

import graphfuse
from graphfuse.formats import cache, structure, walk
from graphfuse.nn._dispatch import path_taken
from graphfuse.train.loop import captured
from tests._models import EDGE_DIM, MODELS, OUT, TYPES, WIDTH, Inputs, run


class Net(torch.nn.Module):
    """A GCN and a GAT with what leaves traces: batch norm, dropout, a buffer of edges."""

    def __init__(self, edge_index: Tensor, width: int = WIDTH) -> None:
        super().__init__()
        self.first = graphfuse.nn.GCNConv(width, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.second = graphfuse.nn.GATConv(4, OUT, dropout=0.5)
        self.register_buffer("edges", edge_index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        self.calls = self.calls + 1
        x = torch.nn.functional.dropout(self.norm(self.first(x, edge_index, edge_weight)), 0.5, self.training)
        out: Tensor = self.second(x, self.edges)
        return out


@pytest.fixture
def inputs(device: torch.device) -> Inputs:
    return Inputs(device)


@pytest.fixture
def net(inputs: Inputs, device: torch.device) -> Net:
    return Net(inputs.edge_index, -1).to(device)


@pytest.fixture
def data(inputs: Inputs) -> Data:
    return Data(x=inputs.x.detach(), edge_index=inputs.edge_index, edge_weight=inputs.edge_weight)


@pytest.fixture
def pyg_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What warmup restores does not depend on kernels; the interpreter takes seconds."""
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")


def step(model: torch.nn.Module, data: Data) -> None:
    model(data.x, data.edge_index, data.edge_weight).sum().backward()


def test_nothing_is_left_to_build(
    inputs: Inputs, data: Data, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphfuse.clear_cache()
    net = Net(inputs.edge_index).to(device)
    assert graphfuse.warmup(net, data) is net

    def plans() -> dict[int, tuple[walk.Walk, set[Any]]]:
        walks = [one for both in walk._WALKS.values() for one in both.values()]
        return {id(one): (one, {*one.plans, *one.derived}) for one in walks}

    def refuse(*args: Any) -> None:
        raise AssertionError("built after the warm-up")

    before = plans()
    assert any("copies" in keys for _, keys in before.values())
    monkeypatch.setattr(cache, "_find_or_build", refuse)
    for name in structure._MAKERS:
        monkeypatch.setitem(structure._MAKERS, name, refuse)
    step(net, data)
    assert path_taken(net.first) == path_taken(net.second) == []
    for key, (_, keys) in plans().items():  # none is new, and none has more
        assert keys == before[key][1]


@pytest.mark.parametrize("training", [True, False])
def test_no_trace_is_left(training: bool, net: Net, data: Data, pyg_path: None) -> None:
    graphfuse.warmup(net, data)  # draws the lazy parameter
    step(net, data)
    net.train(training)
    net.second.train()
    data.x.requires_grad_()
    weight = data.edge_weight.requires_grad_()
    data.edge_weight = 2 * weight  # the graph behind it is the caller's
    passed: list[Tensor] = []

    def optimize(parameter: Tensor) -> None:
        parameter.data.zero_()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(optimize)
        parameter.register_hook(passed.append)

    def state() -> list[Any]:
        gradients = [parameter.grad for parameter in net.parameters()]
        return [*net.parameters(), *gradients, *net.buffers(), *data.to_dict().values()]

    def random() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if net.edges.is_cuda else [])]

    objects, values, drawn = state(), [part.clone() for part in state()], random()
    versions = net.edges._version, data.edge_index._version
    modes = [module.training for module in net.modules()]
    graphfuse.warmup(net, data)
    assert all(one is same for one, same in zip(state(), objects, strict=True))
    assert all(map(torch.equal, state(), values))
    assert all(map(torch.equal, random(), drawn))
    assert (net.edges._version, data.edge_index._version) == versions  # else their row windows would be stale
    assert [module.training for module in net.modules()] == modes
    assert data.x.grad is None and weight.grad is None
    assert len(passed) == (len(list(net.parameters())) if training else 0)
    data.edge_weight.sum().backward()
    step(net, Data(x=data.x, edge_index=data.edge_index))
    assert not any(parameter.any() for parameter in net.parameters())  # the hooks are back


def test_a_failing_model_leaves_none_either(net: Net, data: Data, pyg_path: None) -> None:
    graphfuse.warmup(net, data)
    step(net, data)
    calls, random = net.calls.clone(), torch.get_rng_state()
    net.second.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        graphfuse.warmup(net, data)
    assert torch.equal(net.calls, calls) and torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is not None for parameter in net.parameters())


class Normed(torch.nn.Module):
    """A model behind a batch norm, whose statistics training would change."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.norm = model, torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = {name: self.norm(one) for name, one in x.items()} if isinstance(x, dict) else self.norm(x)
        return self.model(x, edge_index)


@pytest.mark.parametrize("name", ["GCN jk", "HeteroConv"])
def test_lazy_parameters_are_those_of_the_first_call(
    name: str, inputs: Inputs, device: torch.device, pyg_path: None
) -> None:
    case, drawn = MODELS[name], []
    for first in (lambda model, *args: model.eval()(*args), graphfuse.warmup):
        torch.manual_seed(0)
        model = Normed(graphfuse.convert(case.make()).model).to(device)
        first(model, *case.arguments(inputs))
        drawn.append([*model.state_dict().values(), torch.rand(3)])
    assert model.training and all(map(torch.equal, *drawn))


def test_recomputed_layers_and_other_processes(inputs: Inputs, device: torch.device, pyg_path: None) -> None:
    case = MODELS["DeepGCN"]
    model = graphfuse.convert(case.make()).model.to(device)
    arguments = case.arguments(inputs)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        wanted = run(model, case, inputs)
        waited: list[Any] = []
        parallel.register_forward_pre_hook(lambda *args: waited.append(args))
        assert graphfuse.warmup(parallel, *arguments) is parallel
        assert not waited
        for found, one in zip(run(parallel, case, inputs), wanted, strict=True):
            torch.testing.assert_close(found, one)
    finally:
        torch.distributed.destroy_process_group()


class Recorder(torch.nn.Module):
    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Any = None, size: Any = None, edge_attr: Any = 1
    ) -> list[Any]:
        self.got = {"x": x, "edge_index": edge_index, "batch": batch, "size": size, "edge_attr": edge_attr}
        return []


class OfData(torch.nn.Module):
    def forward(self, data: Data) -> None:
        self.got = data


class OfTypes(torch.nn.Module):
    def forward(self, x_dict: Any, edge_index: Any, y: Any, missing: Any = 0) -> None:
        self.got = x_dict, edge_index, y, missing


def test_data_is_matched_by_name(inputs: Inputs) -> None:
    graph = Data(x=inputs.x, edge_index=inputs.edge_index, size=5, y=torch.ones(1))
    model = graphfuse.warmup(Recorder(), graph)
    assert model.got["edge_index"] is graph.edge_index and model.got["size"] == 5
    assert model.got["batch"] is None and model.got["edge_attr"] == 1
    assert torch.equal(model.got["x"], graph.x) and model.got["x"] is not graph.x  # as it requires a gradient
    batch = Batch.from_data_list([Data(x=graph.x.detach(), edge_index=graph.edge_index)] * 2)
    model = graphfuse.warmup(Recorder(), batch)
    assert all(model.got[name] is batch[name] for name in ("x", "edge_index", "batch"))
    model = graphfuse.warmup(Recorder(), batch.x, edge_index=batch.edge_index)
    assert model.got["x"] is batch.x and model.got["edge_index"] is batch.edge_index
    model = graphfuse.warmup(OfData(), graph)
    assert isinstance(model.got, Data) and model.got.edge_index is graph.edge_index
    assert graphfuse.warmup(OfData(), data=batch).got.batch is batch.batch


def test_types_are_matched_by_name(inputs: Inputs) -> None:
    graph = HeteroData(y=3)
    for name, x in inputs.x_dict.items():
        graph[name].x = x.detach()
    for kind in TYPES:
        graph[kind].edge_index = inputs.edge_index_dict[kind]
    x_dict, edge_index, y, missing = graphfuse.warmup(OfTypes(), graph).got
    assert (y, missing) == (3, 0)
    assert all(x_dict[name] is graph[name].x for name in ("user", "item")) and len(x_dict) == 2
    assert all(edge_index[kind] is graph[kind].edge_index for kind in TYPES) and len(edge_index) == 2
    for name in ("HeteroConv", "to_hetero"):
        graphfuse.warmup(MODELS[name].make().to(graph["user"].x.device), graph)


def test_what_cannot_be_matched_is_named(inputs: Inputs) -> None:
    remedy = r"call warmup\(model, \*arguments\)"
    message = rf"must hold 'edge_index', which GCN\.forward takes \(it holds x\); {remedy}"
    with pytest.raises(ValueError, match=message):
        graphfuse.warmup(pyg.GCN(WIDTH, 4, 1), Data(x=inputs.x))
    with pytest.raises(ValueError, match=rf"cannot be matched with HeteroConv\.forward.*{remedy}"):
        graphfuse.warmup(MODELS["HeteroConv"].make().convs[0], HeteroData())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_capture_needs_nothing_else() -> None:
    inputs = Inputs("cuda")
    theirs = torch.nn.ModuleList(
        [
            pyg.GCNConv(WIDTH, 4),
            pyg.GATConv(4, 4, dropout=0.5, edge_dim=EDGE_DIM),
            pyg.TransformerConv(4, 4, dropout=0.5),
            pyg.GATv2Conv(4, 4, dropout=0.5),
            pyg.AGNNConv(),
        ]
    )

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = graphfuse.convert(theirs).model

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_weight: Tensor) -> Tensor:
            first, second, *others = self.layers
            x = second(first(x, edge_index, edge_weight), edge_index, edge_attr)
            for layer in others:
                x = layer(x, edge_index)
            return x

    model = Layers().cuda()
    graph = Data(x=inputs.x.detach(), edge_index=inputs.edge_index)
    graph.edge_attr, graph.edge_weight = inputs.edge_attr, inputs.edge_weight
    arguments = (graph.x, graph.edge_index, graph.edge_attr, graph.edge_weight)
    random = torch.cuda.get_rng_state()
    graphfuse.warmup(model, graph)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    parameters = list(model.parameters())
    assert all(parameter.grad is None for parameter in parameters)

    def step() -> tuple[Tensor, ...]:
        out = model(*arguments)
        return out.detach(), *torch.autograd.grad(out.square().sum(), parameters, materialize_grads=True)

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replay = captured(step, warmup=0)
    torch.cuda.manual_seed(1)
    found = [part.clone() for part in replay()]
    torch.cuda.manual_seed(1)
    assert all(map(torch.equal, found, step()))
    assert [path_taken(layer) for layer in model.layers] == [[]] * 5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_capture_names_warmup() -> None:
    inputs = Inputs("cuda")
    model = graphfuse.convert(pyg.GCN(WIDTH, 4, 2, OUT)).model.cuda()
    message = r"graphfuse\.warmup\(model, data\)"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(inputs.x, inputs.edge_index)
    torch.cuda.synchronize()
