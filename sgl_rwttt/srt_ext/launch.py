"""What SGLang needs to be told at start-up, for a machine and a checkpoint.

:func:`prepare_environment` sets process environment, before SGLang or torch is imported.
:func:`engine_defaults` gives keyword arguments for ``sglang.Engine``; :func:`cli_args` the same as
flags for ``python -m sglang.launch_server``. Nothing here imports torch, transformers or SGLang.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from .attention import CPU_ATTENTION
from .options import ENV_ACTIVE, ENV_BOOT, ENV_MODELS, ENV_OPTIONS
from .ranks import ENV_BIND, is_bound
from .refusals import RADIX_BACKEND

CPU_KV_BYTES = 1 << 30  # KV pool of a CPU engine, unless max_total_tokens says otherwise
MIN_KV_TOKENS = 4096

STUB_FOLDER = Path(__file__).resolve().parent / "cpu_kernel_stub"

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@functools.cache
def has_cuda() -> bool:
    """Whether the CUDA driver sees a device; a fraction of a second, and imports no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return count.value > 0


def has_cpu_kernels() -> bool:
    """Whether the installed ``sgl_kernel`` is a CPU build (the published wheel is not).

    The CUDA wheel keeps its operators in one folder per GPU generation and needs libcuda to be
    imported; a CPU build has ``common_ops`` beside ``__init__.py``.
    """
    try:
        spec = importlib.util.find_spec("sgl_kernel")
    except ValueError:  # a module put into sys.modules by hand, without a spec
        return True
    folders = (spec.submodule_search_locations if spec else None) or []
    return any(path for folder in folders for path in Path(folder).glob("common_ops*.so"))


def physical_cores() -> int:
    """Physical cores that this process may run on, at least 1."""
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def cpu_environment(python_path: str = "") -> dict[str, str]:
    """The variables that SGLang needs on this machine; empty with a CUDA device.

    ``python_path`` is the present value of PYTHONPATH, which is kept behind the stand-in's folder.
    """
    if has_cuda():
        return {}
    variables = {"SGLANG_USE_CPU_ENGINE": "1"}
    if not has_cpu_kernels():
        kept = [part for part in python_path.split(os.pathsep) if part]
        others = [part for part in kept if part != str(STUB_FOLDER)]
        variables["PYTHONPATH"] = os.pathsep.join([str(STUB_FOLDER), *others])
    return variables


def prepare_environment(environ: MutableMapping[str, str] | None = None, ranks: int = 1) -> None:
    """Make SGLang importable and reasonably fast here; idempotent, call it before importing either.

    Modifies ``os.environ`` (or the given mapping) and ``sys.path``. Without a CUDA device it sets
    SGLANG_USE_CPU_ENGINE=1 and, unless ``sgl_kernel`` is a CPU build, puts the stand-in's folder in
    front of PYTHONPATH, so that spawned processes find it, and of ``sys.path``. OMP_NUM_THREADS and
    TOKENIZERS_PARALLELISM are set only where they are not: OpenMP's own default of one thread per
    logical core makes two busy processes on one machine hundreds of times slower. The cores are
    shared out among ``ranks`` data-parallel ranks.
    """
    env = os.environ if environ is None else environ
    variables = cpu_environment(env.get("PYTHONPATH", ""))
    env.update(variables)
    if "PYTHONPATH" in variables and str(STUB_FOLDER) not in sys.path:
        sys.path.insert(0, str(STUB_FOLDER))
    if "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(max(1, physical_cores() // ranks))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")


def fresh_environment() -> dict[str, str]:
    """This process's environment without what an engine started in it left for its own children.

    For a process that starts another server: the state options and the active plugin of the
    first one are not meant for it.
    """
    left = {ENV_ACTIVE, ENV_BOOT, ENV_OPTIONS, ENV_MODELS} | ({ENV_BIND} if is_bound() else set())
    return {name: value for name, value in os.environ.items() if name not in left}


def local_config(model_path: str | os.PathLike[str]) -> dict[str, Any]:
    """``config.json`` of a local checkpoint folder; empty for a hub name or an unreadable file.

    An unreadable checkpoint is SGLang's to report: it names the folder and what it looked for.
    """
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        return config if isinstance(config, dict) else {}
    return {}


def _dtype(config: dict[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    return name if name in _DTYPE_BYTES else None


def _kv_tokens(config: dict[str, Any], dtype: str) -> int | None:
    """Tokens whose K and V fit CPU_KV_BYTES; None when the config does not say their size."""
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 2 * config["num_hidden_layers"] * heads * head_dim * _DTYPE_BYTES[dtype]
    except KeyError:
        return None
    return max(MIN_KV_TOKENS, CPU_KV_BYTES // int(per_token))


def _device_defaults(config: dict[str, Any], device: str, has_state: bool) -> dict[str, Any]:
    dtype = _dtype(config)
    if device != "cpu":
        defaults: dict[str, Any] = {"device": device, "attention_backend": "flashinfer"}
        if dtype == "float32":  # SGLang's "auto" would take float16
            defaults["dtype"] = "bfloat16"
        return defaults
    attention = CPU_ATTENTION if has_state and not has_cuda() else "torch_native"
    defaults = {"device": "cpu", "attention_backend": attention, "sleep_on_idle": True}
    if dtype is not None:
        defaults["dtype"] = dtype
        tokens = _kv_tokens(config, dtype)
        if tokens is not None:
            defaults["max_total_tokens"] = tokens
    return defaults


def _defaults(
    model_path: str | os.PathLike[str], device: str | None, backend: str | None = None
) -> dict[str, Any]:
    config = local_config(model_path)
    has_state = config.get("ttt_mode") is True or backend is not None
    defaults = _device_defaults(config, device or ("cuda" if has_cuda() else "cpu"), has_state)
    if has_state:
        # Naming the cache makes SGLang stop when the plugin that provides it did not load.
        defaults |= {"radix_cache_backend": RADIX_BACKEND, "disable_overlap_schedule": True}
    return defaults


def engine_defaults(model_path: str | os.PathLike[str], **overrides: Any) -> dict[str, Any]:
    """Keyword arguments for ``sglang.Engine``: our defaults for this machine, then ``overrides``.

    Overrides pass through unchecked, unknown ones too: SGLang names those it does not know.
    """
    defaults = _defaults(model_path, overrides.get("device"))
    if "radix_cache_backend" in defaults:
        defaults["disable_cuda_graph"] = True
    return {
        "model_path": os.fspath(model_path),
        "log_level": "error",
        **defaults,
        **overrides,
    }


def _flag_value(extra: list[str], flag: str) -> str | None:
    for index, argument in enumerate(extra):
        if argument == flag:
            return extra[index + 1] if index + 1 < len(extra) else ""
        if argument.startswith(flag + "="):
            return argument[len(flag) + 1 :]
    return None


def data_parallel_ranks(extra: list[str]) -> int:
    """The ranks that SGLang flags ask for; 1 where they say nothing that is a number."""
    given = _flag_value(extra, "--dp-size") or _flag_value(extra, "--data-parallel-size") or ""
    return max(1, int(given)) if given.isdecimal() else 1


def cli_args(model_path: str | os.PathLike[str], extra: list[str]) -> list[str]:
    """Flags for ``sglang.launch_server``: defaults that ``extra`` leaves open, then ``extra``."""
    device, backend = _flag_value(extra, "--device"), _flag_value(extra, "--ttt-backend")
    defaults = {"host": "127.0.0.1", **_defaults(model_path, device, backend)}
    arguments = ["--model-path", os.fspath(model_path)]
    for field, value in defaults.items():
        flag = "--" + field.replace("_", "-")
        if _flag_value(extra, flag) is None:
            arguments += [flag] if value is True else [flag, str(value)]
    return [*arguments, *extra]
