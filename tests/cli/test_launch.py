"""Environment and defaults of a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt.srt_ext import launch
from sgl_rwttt.srt_ext.launch import cli_args, cpu_environment, engine_defaults

NAMES = (
    "copy_all_layer_kv_cache_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
    "fill_bonus_tokens_cpu",
    "fill_accept_out_cache_loc_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "rmsnorm",
)
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "dtype": "float32",
}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: True)


def checkpoint(folder: Path, **keys: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **keys}))
    return str(folder)


def test_stand_in_names_itself_in_a_child_process(cpu: None) -> None:
    """A spawned scheduler imports the CUDA build, or a call into the stand-in passes unnoticed."""
    env = {**os.environ, **cpu_environment()}
    code = (
        "import sgl_kernel\n"
        f"for name in {NAMES!r}:\n"
        "    try:\n        getattr(sgl_kernel, name)(1, out=2)\n"
        "    except NotImplementedError as error:\n"
        "        assert 'sgl_kernel.' + name in str(error)\n"
        "    else:\n        raise SystemExit(name)\n"
    )
    if "PYTHONPATH" in env:
        subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_environment_is_idempotent_and_keeps_what_is_set(
    cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine in one process makes PYTHONPATH longer; a user's OMP_NUM_THREADS is replaced."""
    monkeypatch.setattr(launch, "has_cpu_kernels", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = {"PYTHONPATH": "mine", "OMP_NUM_THREADS": "3"}
    for _ in range(2):
        launch.prepare_environment(env)
    assert env == {
        "PYTHONPATH": f"{launch.STUB_FOLDER}{os.pathsep}mine",
        "OMP_NUM_THREADS": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    assert sys.path.count(str(launch.STUB_FOLDER)) == 1


def test_a_cpu_build_of_sgl_kernel_is_used(
    cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stand-in hides real CPU kernels."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    assert "PYTHONPATH" in cpu_environment()
    (package / "common_ops.abi3.so").touch()
    assert cpu_environment() == {"SGLANG_USE_CPU_ENGINE": "1"}


def test_a_gpu_needs_nothing(gpu: None) -> None:
    """The CPU engine is forced onto a machine with a GPU."""
    assert cpu_environment("mine") == {}


def test_cpu_defaults(cpu: None, tmp_path: Path) -> None:
    """A small model takes all memory of the machine, or float16 that a CPU is slow in."""
    defaults = engine_defaults(checkpoint(tmp_path, ttt_mode=True))
    assert defaults == {
        "model_path": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "rwttt_cpu",
        "radix_cache_backend": "ttt",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": (1 << 30) // (2 * 4 * 2 * 32 * 4),
        "sleep_on_idle": True,
        "log_level": "error",
    }


def test_gpu_defaults(gpu: None, tmp_path: Path) -> None:
    """SGLang turns a float32 checkpoint into float16, in which attention sinks overflow."""
    defaults = engine_defaults(checkpoint(tmp_path))
    assert (defaults["device"], defaults["dtype"]) == ("cuda", "bfloat16")
    assert defaults["attention_backend"] == "flashinfer"
    assert not {"radix_cache_backend", "disable_cuda_graph", "max_total_tokens"} & set(defaults)
    assert "dtype" not in engine_defaults(checkpoint(tmp_path, dtype="bfloat16"))


def test_overrides_win_and_unknown_ones_pass(gpu: None, tmp_path: Path) -> None:
    """A misspelt option is dropped here instead of being refused by SGLang."""
    path = checkpoint(tmp_path)
    defaults = engine_defaults(path, device="cpu", log_level="info", max_totl_tokens=5)
    assert defaults["attention_backend"] == "torch_native"
    assert (defaults["log_level"], defaults["max_totl_tokens"]) == ("info", 5)


def test_cli_adds_only_what_is_not_given(cpu: None, tmp_path: Path) -> None:
    """--flag=value is not seen as given, and argparse takes the last of two."""
    path = checkpoint(tmp_path, ttt_mode=True)
    extra = ["--dtype=bfloat16", "--max-total-tokens", "99", "--disable-overlap-schedule"]
    arguments = cli_args(path, extra)
    given = ["--model-path", path, "--host", "127.0.0.1", "--device", "cpu"]
    assert arguments[: len(given)] == given
    assert arguments[-len(extra) :] == extra
    flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    assert len(flags) == len(set(flags))
    assert "--radix-cache-backend" in flags


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["absent", "broken", "no-object"])
def test_an_unreadable_checkpoint_is_left_to_sglang(
    cpu: None, tmp_path: Path, content: str | None
) -> None:
    """A traceback about our own defaults hides which folder is wrong."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert "radix_cache_backend" not in engine_defaults(tmp_path)


@pytest.mark.slow
def test_sglang_knows_every_name(cpu: None, tmp_path: Path) -> None:
    """SGLang renames a flag, and every start with our defaults ends in a usage message."""
    path = checkpoint(tmp_path, ttt_mode=True)
    fields = [name for name in engine_defaults(path) if name != "model_path"]
    code = (
        "import argparse, sys\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "from sgl_rwttt.srt_ext.attention import register_attention\n"
        "register_attention()\n"
        "parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        f"parser.parse_args({cli_args(path, [])!r})\n"
        f"unknown = [name for name in {fields!r} if not hasattr(ServerArgs, name)]\n"
        "sys.exit(' '.join(unknown) or 0)\n"
    )
    env = {**os.environ, **cpu_environment(os.environ.get("PYTHONPATH", "")), "SGLANG_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
