"""Configurations, the loop on one full graph, and what it reports."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from graphfuse.train import config, datasets, loop, models, report
from graphfuse.train.config import TrainConfig
from tests.train._runs import MODELS, nodes, settings

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
CORA = FOLDER / "cora_gcn.yaml"
PUBLISHED = [
    *(f"{data}_{model}" for data in ("cora", "citeseer", "pubmed", "reddit")
      for model in ("gcn", "gat", "agnn", "transformer")),
    *(f"ogbn-arxiv_{model}" for model in ("gcn", "gat", "transformer")),
    *("ogbn-products_gcn", "molhiv_transformer", "zinc_graph_transformer", "quickstart"),
]  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configurations_are_flat_and_complete(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    assert list(written) == [field.name for field in dataclasses.fields(TrainConfig)]
    found, text = config.load(path)
    assert dataclasses.asdict(found) == written
    assert yaml.safe_load(text) == written
    assert found.dataset in datasets.NAMES and found.model in path.stem.replace("quickstart", "gcn")
    graphs = found.dataset in ("ogbg-molhiv", "zinc")
    assert (found.loader == "graphs") == graphs
    width = found.hidden_channels
    model = models.build(found, 10 + found.random_walk, 3, 4 if found.edge_features else None, graphs)
    assert any(width in parameter.shape for parameter in model.parameters())
    models.groups(model, found.weight_decay)


def test_the_configurations_of_the_documentation_exist() -> None:
    assert sorted(PUBLISHED) == [path.stem for path in CONFIGS]


def test_overrides() -> None:
    found, text = config.load(CORA, ["lr=0.5", "weight_decay=[0.1,0.2]", "cuda_graph=true"])
    assert (found.lr, found.weight_decay, found.cuda_graph) == (0.5, [0.1, 0.2], True)
    assert "lr: 0.5" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hidden=3"], "--hidden"),
        (["lr=fast"], "lr"),
        (["layers=dgl"], "layers"),
        (["lr"], "key=value"),
        (["num_layers=3"], "one value for each of the 3 layers"),
        (["model=agnn"], "`weight_decay` must have one value (got 2)"),
        (["weight_decay=[0.1,-0.1]"], "`weight_decay` must be at least 0 (got [0.1, -0.1])"),
        (["epochs=0"], "`epochs` must be at least 1"),
        (["schedule=cosine", "min_lr=-0.1"], "`min_lr` must be at least 0 (got -0.1)"),
        (["schedule=plateau", "lr_patience=-1"], "`lr_patience` must be at least 0 (got -1)"),
        (["schedule=plateau", "lr_factor=-0.5"], "`lr_factor` must be in [0, 1) (got -0.5)"),
        (["dropout=1"], "`dropout` must be in [0, 1)"),
        (["heads=3"], "`hidden_channels` must be a multiple of `heads` (got 16 and 3)"),
        (["batch_size=8"], "`batch_size` must be 0 with loader=full (got 8)"),
        (["loader=graphs"], "`batch_size` must be positive with loader=graphs"),
        (["loader=neighbor", "batch_size=8"], "`num_neighbors` must be a number for each hop"),
        (["num_neighbors=[2]"], "`num_neighbors` must be empty with loader=full"),
        (["loader=graphs", "batch_size=8", "cuda_graph=true"], "`cuda_graph` needs loader=full"),
        (["edge_features=true"], "`edge_features` must be false with model=gcn"),
        (["gate=true"], "`gate` must be false with model=gcn"),
        (["attention_dropout=0.1"], "`attention_dropout` must be 0 with model=gcn"),
        (["model=graph_transformer", "weight_decay=[0]"], "`norm` must be batch or layer"),
    ],
)
def test_wrong_settings_exit_with_2(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        config.load(CORA, overrides)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_key_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(CORA.read_text() + "learning_rate: 0.1\n")
    with pytest.raises(SystemExit) as exit_:
        config.load(path)
    assert exit_.value.code == 2
    assert "learning_rate" in capsys.readouterr().err


def losses(result: loop.Result) -> torch.Tensor:
    return torch.tensor(result.curve, dtype=torch.float64)[:, 0]


@pytest.mark.parametrize("model", ["gcn", "gat", "agnn", "transformer"])
def test_fused_training_follows_pygs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.warmup", lambda *_: None)  # the interpreter is slow
    given = settings(model, dropout=0.3, eval_every=2)  # drawn from one generator by both
    ours = loop.train(given, nodes(15), progress=False)
    theirs = loop.train(dataclasses.replace(given, layers="pyg"), nodes(15), progress=False)
    torch.testing.assert_close(losses(ours), losses(theirs), rtol=1e-3, atol=1e-5)


def test_the_path_is_reported() -> None:
    ours, theirs = (
        loop.train(settings(layers=layers, num_layers=1, weight_decay=[0.0], epochs=1), nodes(15), False)
        for layers in ("graphfuse", "pyg")
    )
    assert (ours.path, ours.reasons) == ("fused", [])
    assert (theirs.path, theirs.reasons) == ("pyg", [])


@pytest.mark.parametrize("model", MODELS)
def test_equal_seeds_give_equal_weights(model: str) -> None:
    def build(layers: str, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        found = models.build(settings(model, layers=layers), 6, 3).state_dict()
        return {**found, "next": torch.rand(3)}

    ours, theirs = build("graphfuse", 0), build("pyg", 0)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = build("graphfuse", 1)
    assert any(not torch.equal(ours[name], other[name]) for name in ours if name != "next")


def test_what_a_run_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    seen: list[tuple[int, dict[str, float]]] = []
    result = loop.train(
        settings(epochs=7, eval_every=3, target=1.0), nodes(), False, None, lambda *row: seen.append(row[1:])
    )
    evaluated = [k + 1 for k, row in enumerate(result.curve) if not math.isnan(row[1])]
    assert evaluated == [epoch for epoch, _ in seen] == [3, 6, 7]  # the last one always
    best = max((row["val"], -epoch) for epoch, row in seen)
    assert (result.val_accuracy, result.best_epoch) == (best[0], -best[1])
    assert result.test_accuracy == dict(seen)[result.best_epoch]["test"]
    assert result.time_to_accuracy_s == seen[0][1]["at_s"] < result.train_s == seen[-1][1]["at_s"]
    assert 0 < result.epoch_ms < 1e3 * result.train_s and result.eval_ms > 0 and result.peak_mib > 0
    assert set(result.setup_ms) == {"windows", "warmup"}
    assert set(result.setup_mib) == set(result.setup_ms)
    assert 0 < result.setup_mib["windows"] <= result.setup_mib["warmup"] <= result.peak_mib  # of a process
    assert loop.train(settings(target=100.1), nodes(), progress=False).time_to_accuracy_s is None


def test_early_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    result = loop.train(settings(epochs=40, patience=3, lr=1e-9, dropout=0.0), nodes(), progress=False)
    assert (result.best_epoch, result.epochs) == (1, 4)  # nothing ever got better
    assert loop.train(settings(epochs=9, lr=1e-9), nodes(), progress=False).epochs == 9


@pytest.mark.parametrize(("eval_every", "patience", "epochs"), [(4, 1, 8), (3, 4, 9), (9, 2, 10)])
def test_training_stops_at_an_evaluation(
    eval_every: int, patience: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run = settings(epochs=10, eval_every=eval_every, patience=patience, lr=1e-9, dropout=0.0)
    result = loop.train(run, nodes(), progress=False)
    assert (result.best_epoch, result.epochs) == (eval_every, epochs)
    assert not math.isnan(result.test_accuracy) and not math.isnan(result.curve[-1][1])


def rates(monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[float]:
    """The learning rate that each epoch starts with."""
    found: list[float] = []
    step = torch.optim.Adam.step

    def watched(self: torch.optim.Adam, *arguments: Any) -> Any:
        found.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    loop.train(settings(**given), nodes(), progress=False)
    return found


def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    cosine = rates(monkeypatch, epochs=4, lr=0.02, min_lr=0.01, schedule="cosine")
    wanted = [0.01 + 0.005 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert cosine == pytest.approx(wanted)
    monkeypatch.undo()
    given = {"schedule": "plateau", "lr_patience": 1, "lr_factor": 0.1, "min_lr": 5e-11}
    plateau = rates(monkeypatch, epochs=6, lr=1e-9, dropout=0.0, **given)
    assert plateau == pytest.approx([1e-9] * 6)  # a step of less than 1e-8 is none to PyTorch
    monkeypatch.undo()
    still = nodes().data.val_mask
    monkeypatch.setattr(loop.tasks.NodeTask, "scores", lambda *_: torch.tensor([50.0, float(still[0])]))
    plateau = rates(monkeypatch, epochs=6, lr=0.1, schedule="plateau", lr_patience=1, min_lr=0.03)
    assert plateau == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05, 0.03])


def test_gradients_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    norms: list[float] = []
    step = torch.optim.Adam.step

    def watched(self: torch.optim.Adam, *arguments: Any) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    loop.train(settings(clip_norm=0.01), nodes(), progress=False)
    loop.train(settings(clip_norm=0.01, dtype="fp16"), nodes(), progress=False)
    loop.train(settings(), nodes(), progress=False)
    assert norms[:4] == pytest.approx([0.01] * 4, rel=1e-3) and min(norms[4:]) > 0.02


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    half, full = (
        loop.train(settings("gat", dtype=kind, dropout=0.0), nodes(), False) for kind in (dtype, "fp32")
    )
    torch.testing.assert_close(losses(half), losses(full), rtol=0.03, atol=0.0)
    assert not torch.equal(losses(half), losses(full))


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain, compiled = (
        loop.train(settings(compile=given, num_layers=1, weight_decay=[0.0]), nodes(), progress=False)
        for given in (False, True)
    )
    torch.testing.assert_close(losses(compiled), losses(plain))
    assert compiled.setup_ms["compile"] > 0 and "compile" not in plain.setup_ms
    assert compiled.path == "generic"


def test_runs_repeat(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", lambda *_: nodes())
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    given = settings(device=str(device))
    (first, _), (second, _) = (report.run(given, 2, True, None, progress=False) for _ in range(2))
    assert first["test_accuracy"] == second["test_accuracy"]
    assert first["test_accuracy"] == pytest.approx(first["pyg"]["test_accuracy"], abs=1e-9)
    assert first["path"] == "generic" and first["reasons"] == ["GRAPHFUSE_DISABLE=1 is set"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_capture_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"`cuda_graph` must be false on a CPU"):
        loop.train(settings(cuda_graph=True), nodes(), progress=False)
    with pytest.raises(RuntimeError, match="capturing a CUDA graph needs a GPU"):
        loop.captured(lambda: None)


@pytest.mark.gpu
def test_a_capture_returns_what_its_step_returns() -> None:
    count = torch.zeros(1, device="cuda")
    replay = loop.captured(lambda: count.add_(1).clone(), warmup=2)
    assert [replay().item() for _ in range(3)] == [3.0, 4.0, 5.0]  # the capture itself computes nothing
    assert replay() is replay()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_capture_that_fails_leaves_no_trace() -> None:
    layer, x = torch.nn.Linear(8, 4).cuda(), torch.randn(16, 8, device="cuda")

    def step() -> torch.Tensor:
        layer.zero_grad()
        loss = torch.nn.functional.dropout(layer(x), 0.5).sum()
        loss.backward()
        return loss.detach()

    def wrong() -> torch.Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        return torch.rand(1, device="cuda") * (1 // (not capturing))

    earlier = loop.captured(lambda: torch.rand(3, device="cuda"))
    kept, stream = layer(x).sum(), torch.cuda.current_stream()
    kept.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"`step` must not meet .* delete or detach them before"):
            loop.captured(step)
        with pytest.raises(ZeroDivisionError):
            loop.captured(wrong)
        assert torch.cuda.current_stream() == stream
        drawn = [torch.rand(3, device="cuda"), earlier().clone(), torch.rand(3, device="cuda")]
        assert len({*map(tuple, torch.stack(drawn).tolist())}) == 3
    del kept
    replay = loop.captured(step)
    losses = [replay().item() for _ in range(4)]
    assert len(set(losses)) == 4  # other numbers are dropped each time


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("given", [{}, {"schedule": "cosine", "dtype": "fp16", "clip_norm": 1.0}])
@pytest.mark.parametrize("model", MODELS)
def test_a_captured_run_is_the_eager_one(model: str, given: dict[str, Any]) -> None:
    run = settings(model, epochs=6, **given)
    eager = loop.train(run, nodes(), progress=False)
    captured = loop.train(dataclasses.replace(run, cuda_graph=True), nodes(), progress=False)
    # a rate that lies on the GPU is rounded to float32
    exact = {} if not given else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(losses(captured), losses(eager), **(exact or {"rtol": 0.0, "atol": 0.0}))
    assert captured.setup_ms["capture"] > 0 and captured.path == "fused"


@pytest.mark.parametrize(
    ("model", "edge_features"),
    [("agnn", False), ("gat", False), ("gat", True), ("gatv2", False), ("gatv2", True)],
)
def test_loops_that_come_with_the_graph(
    model: str, edge_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyG's layers need them in a capture: the same losses as with loops that the layers add."""
    given = settings(model, layers="pyg", epochs=4, edge_features=edge_features, device="cpu")
    assert not given.brings_loops and dataclasses.replace(given, cuda_graph=True).brings_loops
    data = nodes()
    data.data.edge_attr = torch.rand(data.data.num_edges, 3)
    data = dataclasses.replace(data, edge_dim=3)
    loops = torch.tensor([[0, 5, 5], [0, 5, 5]])  # the layers replace those that are there
    data.data.edge_index = torch.cat([data.data.edge_index, loops], 1)
    data.data.edge_attr = torch.cat([data.data.edge_attr, torch.rand(3, 3)])
    wanted = loop.train(given, data, progress=False)
    monkeypatch.setattr(config.TrainConfig, "brings_loops", property(lambda _: True))
    found = loop.train(given, data, progress=False)
    torch.testing.assert_close(losses(found), losses(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2", "agnn", "transformer"])
def test_pygs_layers_are_captured(model: str) -> None:
    run = settings(model, layers="pyg", epochs=6, dropout=0.0, input_dropout=0.0, attention_dropout=0.0)
    eager = loop.train(run, nodes(), progress=False)
    replayed = loop.train(dataclasses.replace(run, cuda_graph=True), nodes(), progress=False)
    torch.testing.assert_close(losses(replayed), losses(eager), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["graphfuse", "pyg"])
def test_captured_training_learns_as_well(layers: str) -> None:
    given, _ = config.load(FOLDER / "quickstart.yaml", ["epochs=60", f"layers={layers}"])
    data = datasets.load("quickstart")
    eager = loop.train(given, data, progress=False)
    captured = loop.train(dataclasses.replace(given, cuda_graph=True), data, progress=False)
    assert captured.test_accuracy == pytest.approx(eager.test_accuracy, abs=4.0)
    assert captured.epoch_ms < eager.epoch_ms and captured.eval_ms < eager.eval_ms


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_on_a_gpu() -> None:
    run = settings("gat", epochs=4, dropout=0.0, input_dropout=0.0)
    plain, compiled = (
        loop.train(dataclasses.replace(run, compile=given), nodes(), progress=False)
        for given in (False, True)
    )
    torch.testing.assert_close(losses(compiled), losses(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.data
def test_cora_beside_pyg(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [] if torch.cuda.is_available() else ["epochs=60"]
    if shorter:  # the interpreter would take hours on 2,708 nodes
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    given, _ = config.load(CORA, shorter)
    found, _ = report.run(given, 2, True, str(data_root), progress=False)
    assert found["test_accuracy"] > 78.0
    assert abs(found["test_accuracy"] - found["pyg"]["test_accuracy"]) <= 1.5  # of two runs; 20 seeds: 0.5
