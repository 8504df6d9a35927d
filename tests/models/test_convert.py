"""Converting any llama or qwen3 checkpoint, on small random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_rwttt.models import convert as convert_module
from sgl_rwttt.models.convert import Settings, convert
from sgl_rwttt.models.embedded import ensure, find_gguf
from sgl_rwttt.models.held_out import Change, HeldOut
from sgl_rwttt.models.measure import LayerStats, pick_layers, windows_of
from sgl_rwttt.models.texts import FREQUENCY, text
from sgl_rwttt.srt_ext.checkpoint import check_checkpoint
from tests.models.tiny import save_tiny

pytestmark = pytest.mark.timeout(120)
UNCHECKED = Settings(chunk=8, is_checked=False)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("kind", "tied", "dtype", "shards"),
    [
        ("llama", True, torch.float32, "5GB"),
        ("llama", False, torch.bfloat16, "30KB"),
        ("qwen3", True, torch.bfloat16, "30KB"),
        ("qwen3", False, torch.float16, "5GB"),
    ],
    ids=["llama", "llama-untied-sharded", "qwen3-sharded", "qwen3-untied"],
)
def test_the_base_stays_and_a_server_takes_it(
    kind: str, tied: bool, dtype: torch.dtype, shards: str, tmp_path: Path
) -> None:
    """A shard is forgotten, a weight is rounded, or the start-up check refuses what was written."""
    save_tiny(tmp_path / "base", kind, tied, dtype, shards)
    if shards == "30KB":
        assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    done = convert(tmp_path / "base", tmp_path / "ttt", UNCHECKED, progress=False)
    config = config_of(done.folder)
    rule = check_checkpoint(str(done.folder), config)
    assert (rule.chunk, rule.layers) == (8, (1, 2, 3))
    assert config["dtype"] == str(dtype).removeprefix("torch.") == done.dtype
    assert config["architectures"] == config_of(tmp_path / "base")["architectures"]
    weights = load_file(done.folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype).state_dict()
    if tied:
        base.pop("lm_head.weight")
    assert {name for name in weights if ".ttt_" not in name} == set(base)
    assert all(torch.equal(weights[name], tensor) for name, tensor in base.items())
    old, new = (AutoTokenizer.from_pretrained(tmp_path / each) for each in ("base", "ttt"))
    assert old("Yes or no?")["input_ids"] == new("Yes or no?")["input_ids"]


def rows_of(model: Any, ids: list[int]) -> list[Tensor]:
    """|h|^2 per token of each layer's MLP, by hand: act(gate) * up of its input."""
    found: list[Tensor] = []

    def hook(mlp: Any, inputs: tuple[Tensor]) -> None:
        x = inputs[0][0]
        h = torch.nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
        found.append((h * h).sum(1))

    handles = [layer.mlp.register_forward_pre_hook(hook) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_kappa_and_sinks_are_measured(kind: str, tmp_path: Path) -> None:
    """First rows in the mean, a window without its BOS, or another layer's rows."""
    model = save_tiny(tmp_path / "base", kind)
    done = convert(tmp_path / "base", tmp_path / "ttt", UNCHECKED, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    ids = tokenizer.encode(text(FREQUENCY), add_special_tokens=False)
    bos = tokenizer.bos_token_id
    windows = [[bos, *ids[at : at + 255]] for at in range(0, len(ids) - 255, 255)]
    observed = [rows_of(model, window) for window in windows]
    by_layer = [torch.stack(rows) for rows in zip(*observed, strict=True)]
    assert done.measured is not None
    for rows, stats in zip(by_layer, done.measured.layers, strict=True):
        mean = rows[:, 1:].mean()
        assert stats.kappa == pytest.approx(float(1 / mean), rel=1e-4)
        assert stats.sink == pytest.approx(float(rows[:, 0].mean() / mean), rel=1e-4)
        assert stats.peak == pytest.approx(float(rows[:, 1:].max() / mean), rel=1e-4)
    kappa = [stats.kappa for stats in done.measured.layers]
    config = config_of(done.folder)
    assert config["ttt_lr"] == kappa[config["ttt_layers"][0]] == done.recipe.lr
    assert done.recipe.kappa == tuple(kappa[n] for n in config["ttt_layers"])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_association_raises_its_tokens_logit(tied: bool, tmp_path: Path) -> None:
    """With an untied head the embedding of a token is not the direction that raises its logit."""
    model = save_tiny(tmp_path / "base", tied=tied, hidden_size=64, head_dim=16)
    if not tied:  # a head that has to do with the embeddings, as in a trained model
        with torch.no_grad():
            turn = torch.linalg.qr(torch.randn(64, 64)).Q
            model.lm_head.weight.copy_(3 * model.model.embed_tokens.weight @ turn)
        model.save_pretrained(tmp_path / "base")
    done = convert(tmp_path / "base", tmp_path / "ttt", UNCHECKED, progress=False)
    name = f"model.layers.{done.recipe.layers[0]}.mlp.ttt_proj.weight"
    proj = load_file(done.folder / "model.safetensors")[name]
    table, head, norm = (
        each.weight.detach() for each in (model.model.embed_tokens, model.lm_head, model.model.norm)
    )
    scores = (table @ proj * norm) @ head.T  # [associated token, logit]
    assert (scores.argmax(1) == torch.arange(len(table))).float().mean() > 0.95
    # as far as in the model that the recipe was made on, on average
    ids = AutoTokenizer.from_pretrained(tmp_path / "base").encode(text(FREQUENCY))
    assert done.measured is not None
    push = scores.diagonal()[ids[1:]].mean() / done.measured.rms
    assert 0.15 < float(push) < 0.35


def test_what_is_given_is_taken(tmp_path: Path) -> None:
    """An option that is parsed and then overwritten by what was measured."""
    save_tiny(tmp_path / "base")
    settings = Settings((0, 2), (0.5, 0.25), 16, 0.125, 3.0, "bfloat16", is_checked=False)
    done = convert(tmp_path / "base", tmp_path / "ttt", settings, progress=False)
    config = config_of(done.folder)
    assert (config["ttt_layers"], config["ttt_chunk"], config["ttt_lr"]) == ([0, 2], 16, 0.125)
    assert done.measured is None
    weights = load_file(done.folder / "model.safetensors")
    first, second = (weights[f"model.layers.{n}.mlp.ttt_proj.weight"].float() for n in (0, 2))
    assert torch.equal(first * 0.5, second)
    assert weights["model.norm.weight"].dtype == torch.bfloat16
    again = Settings((0, 2), None, 16, None, 6.0, is_checked=False)
    done = convert(tmp_path / "base", tmp_path / "other", again, progress=False)
    assert done.measured is not None
    assert done.recipe.lr == done.measured.layers[0].kappa
    assert done.recipe.gain == 6.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported"),
        ({"architectures": None}, "architecture None"),
        ({"ttt_mode": True}, "TTT checkpoint already"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu', not 'silu'"),
        ({"hidden_size": "many"}, "cannot be loaded|is not one of a Llama"),
        ({"num_hidden_layers": 5}, "weights do not fit config.json"),
        ({"num_hidden_layers": 3}, "weights do not fit config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_converted_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A model of another kind becomes a checkpoint that starts and talks nonsense."""
    save_tiny(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "base", tmp_path / "ttt", UNCHECKED, progress=False)
    assert not (tmp_path / "ttt").exists()


def test_broken_sources_are_refused(tmp_path: Path) -> None:
    """A traceback out of a reader, where a sentence would do."""

    def refused(source: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "ttt", UNCHECKED, progress=False)

    base = tmp_path / "base"
    refused(base, "does not exist")
    base.mkdir()
    refused(base, "no config.json")
    (base / "config.json").write_text("[1]")
    refused(base, "not a JSON object")
    save_tiny(base, shards="30KB")
    shard = sorted(base.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    refused(base, "is damaged")
    index = base / "model.safetensors.index.json"
    kept = index.read_text()
    index.write_text("{}")
    refused(base, "not an index")
    index.write_text(kept)
    shard.unlink()
    refused(base, f"lacks {shard.name}")
    for each in base.glob("*.safetensors*"):
        each.unlink()
    refused(base, "pickled weights are not read")
    (tmp_path / "model.gguf").write_bytes(b"GGUX" * 10)
    refused(tmp_path / "model.gguf", "GGUF")
    refused(Path(__file__), "neither a checkpoint folder nor a .gguf file")
    save_tiny(base)
    for each in base.glob("tokenizer*"):
        each.unlink()
    refused(base, "tokenizer cannot be loaded")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "ttt"))] == []


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    """A kappa too few shifts the others to the wrong layers."""
    for bad in (
        {"layers": (2, 1)},
        {"layers": (1, 2), "kappa": (0.5,)},
        {"kappa": (0.5,)},
        {"gain": -1.0},
        {"lr": float("nan")},
        {"chunk": 0},
        {"documents": (Path("one"),)},
    ):
        with pytest.raises(ValueError):
            Settings(**bad)  # type: ignore[arg-type]
    save_tiny(tmp_path / "base")
    with pytest.raises(ValueError, match="0 to 3"):
        convert(tmp_path / "base", tmp_path / "ttt", Settings(layers=(4,)), progress=False)
    with pytest.raises(ValueError, match="not more than a chunk of 5000"):
        convert(tmp_path / "base", tmp_path / "ttt", Settings(chunk=5000), progress=False)


def test_the_target_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's folder, or the source itself, is replaced."""
    base, target = tmp_path / "base", tmp_path / "ttt"
    save_tiny(base)
    target.mkdir()
    convert(base, target, UNCHECKED, progress=False)  # empty is free
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert(base, target, UNCHECKED, progress=False)
    replace = Settings(chunk=16, is_checked=False, overwrite=True)
    for inside in (base, tmp_path):
        with pytest.raises(FileExistsError, match="holds the source"):
            convert(base, inside, replace, progress=False)
    with pytest.raises(FileExistsError, match="is a file"):
        convert(base, base / "config.json", replace, progress=False)

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "write_folder", fails)
        with pytest.raises(OSError, match="disk full"):
            convert(base, target, replace, progress=False)
    assert config_of(target)["ttt_chunk"] == 8
    convert(base, target, replace, progress=False)
    assert config_of(target)["ttt_chunk"] == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "ttt"]


def test_the_check_leaves_the_weights_alone(tmp_path: Path) -> None:
    """The document that the check adapted on is in the checkpoint."""
    save_tiny(tmp_path / "base")
    texts = [tmp_path / f"{n}.txt" for n in "ab"]
    texts[0].write_text("The model reads, the model writes. " * 12)
    texts[1].write_text("def f(x): return x + 1  # ok\n" * 12)
    settings = Settings(chunk=8, documents=tuple(texts), gain=40.0)
    checked = convert(tmp_path / "base", tmp_path / "one", settings, progress=False)
    held_out = checked.held_out
    assert held_out is not None
    assert (held_out.reread.n, held_out.unrelated.n) == (2, 2)
    assert abs(held_out.reread.mean) > 1e-4  # something was written
    plain = Settings(chunk=8, is_checked=False, gain=40.0)
    convert(tmp_path / "base", tmp_path / "two", plain, progress=False)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_the_deepest_layers_without_a_sink_are_picked() -> None:
    """One row that is 2,000 times the others is all that a layer can remember."""

    def stats(*sinks: float) -> list[LayerStats]:
        return [LayerStats(n, 1.0, sink, 3.0) for n, sink in enumerate(sinks)]

    assert pick_layers(stats(0, 0, 0, 0, 9, 2000)) == (1, 2, 3)
    assert pick_layers(stats(0, 50, 0, 0, 60)) == (0, 2, 3)
    assert pick_layers(stats(50, 0, 60)) == (1,)
    assert pick_layers([LayerStats(0, 1, 0, 3), LayerStats(1, 1, 0, 150)]) == (0,)
    with pytest.raises(ValueError, match="name the layers yourself"):
        pick_layers(stats(9, 9))


def test_windows() -> None:
    """Tokens are lost between windows, or a window is longer than the context."""
    assert windows_of(range(40), [7], 21) == [[7, *range(20)], [7, *range(20, 40)]]
    assert windows_of(range(25), [], 20) == [[*range(20)]]  # 5 tokens are mostly a first row
    assert windows_of(range(5), [7], 20) == [[7, *range(5)]]


@pytest.mark.parametrize(
    ("reread", "unrelated", "verdict"),
    [
        ([(3.0, 2.7), (2.0, 1.8)], [(3.0, 3.0), (2.0, 2.01)], "It helps: "),
        ([(3.0, 2.7), (2.0, 1.8)], [(3.0, 3.2), (2.0, 2.2)], "dearer"),
        ([(3.0, 2.7), (2.0, 2.2)], [(3.0, 3.0), (2.0, 2.0)], "does not help"),
        ([(3.0, 2.999), (2.0, 1.999)], [(3.0, 3.0), (2.0, 2.0)], "does not help"),
        ([(3.0, 3.1), (2.0, 2.1)], [(3.0, 3.0), (2.0, 2.0)], "does not help"),
        ([(3.0, float("nan")), (2.0, 2.1)], [(3.0, 3.0), (2.0, 2.0)], "breaks"),
    ],
)
def test_the_verdict(reread: Any, unrelated: Any, verdict: str) -> None:
    """A conversion that does nothing is handed out as one that learns."""
    found = HeldOut(Change.of(reread), Change.of(unrelated))
    assert verdict in found.verdict


def test_change_is_paired() -> None:
    """The spread between documents taken for the error of the change."""
    change = Change.of([(3.0, 2.9), (1.0, 0.8)])
    assert change.mean == pytest.approx(-0.15)
    assert change.error == pytest.approx(0.05)
    assert str(change).startswith("2.000 -> 1.850 nats per token, change -0.1500 +- 0.0500 (-7.5 %")


@pytest.mark.slow
def test_the_embedded_model_is_one_of_them(tmp_path: Path) -> None:
    """Two implementations of one recipe drift apart."""
    settings = Settings(
        layers=(24, 25, 26), kappa=(1.834e-3, 2.329e-3, 1.770e-3), gain=1.8, is_checked=False
    )
    done = convert(find_gguf(), tmp_path / "ttt", settings, progress=False)
    folder = ensure(progress=False)
    ours, theirs = (load_file(each / "model.safetensors") for each in (done.folder, folder))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sorted(p.name for p in done.folder.iterdir()) == sorted(p.name for p in folder.iterdir())
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (done.folder / path.name).read_bytes()
