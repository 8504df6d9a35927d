"""A saved LoRA delta leaves as a PEFT folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_rwttt.backends.lora_config import DecoderShape, LoraDeltaConfig
from sgl_rwttt.backends.lora_delta import LoraDeltaBackend
from sgl_rwttt.backends.lora_peft import load_adapter
from sgl_rwttt.backends.lora_slots import initial_adapter
from sgl_rwttt.cli.main import main
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.snapshots import Link
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.srt_ext.context_snapshots import open_snapshots
from sgl_rwttt.srt_ext.options import TTTOptions
from sgl_rwttt.srt_ext.snapshots import Fit, required_fields

CONFIG = LoraDeltaConfig(DecoderShape(2, 32, 4, 2, 8, 56), rank=4, alpha=8.0)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A snapshot folder with "learnt" and "start", and the numbers of the first."""
    backend = LoraDeltaBackend(CONFIG, slots=4, train_tokens=64)
    tensors = initial_adapter(CONFIG, "model")
    tensors["v_proj.lora_B"].normal_()
    root = root_id("model", CONFIG.rule)
    store = TTTStateStore(
        SlotPool(4, "adapter"), SlotPool(1, "base"), 64, 0, root, backend.copy_rows, "tokens"
    )
    chain = (Link("slot", 3, b"3" * 16), Link("same", 5, b"5" * 16))
    store.snapshots.restore("a", chain, lambda base, pages: backend.restore(tensors, base, pages))
    folder = tmp_path / "snapshots"
    folder.mkdir()
    fits = [Fit(required_fields(CONFIG, "float32", "model"), root, backend)]
    snapshots: Any = open_snapshots(TTTOptions(snapshot_dir=str(folder)), fits, store, backend)
    snapshots.save("learnt", store.snapshots.at(b"5" * 16, "a"))
    snapshots.save("start", store.root("a", root))
    again, _ = snapshots.restore("learnt", "b")
    assert again.version.number == 5
    return folder, tensors


def test_a_snapshot_becomes_a_peft_folder(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the export: the numbers, rank, alpha and targets of the saved state."""
    folder, tensors = saved
    (file,) = folder.glob("learnt*")
    assert main(["adapter", str(file), str(tmp_path / "peft"), "--base-model", "m"]) == 0
    found = load_adapter(tmp_path / "peft", CONFIG)
    assert set(found) == set(tensors)
    for name, values in tensors.items():
        assert torch.equal(found[name], values)
    for name, reason in (("start", "starts from"), ("learnt", "header_checksum")):
        (file,) = folder.glob(f"{name}*")
        data = file.read_bytes()
        if name == "learnt":
            file.write_bytes(data.replace(b"alpha=8.0", b"alpha=9.0", 1))
        assert main(["adapter", str(file), str(tmp_path / "none")]) == 1
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
