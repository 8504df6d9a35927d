"""Entry point of the ``sglang.srt.plugins`` group.

SGLang calls :func:`register` once in each of its processes, before anything is built. In the
launching process it registers defaults and refusals that apply only when the checkpoint has
``ttt_mode: true`` or ``--ttt-backend`` names a rule; only then do the scheduler processes find
``RWTTT_ACTIVE`` and install the runtime. Every other checkpoint is served by stock code; it may ask
for our CPU attention by name.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import sys
from typing import Any

from .attention import default_attention, is_asked_for, refuse_misuse, register_attention
from .options import (
    ENV_ACTIVE,
    ENV_BOOT,
    ENV_MODELS,
    TTTOptions,
    add_arguments,
    publish_arguments,
)
from .ranks import bind_cpus
from .refusals import RADIX_BACKEND, refuse_unsupported
from .seams import check_seams
from .snapshot_folder import check_folder

MODEL_PACKAGE = "sgl_rwttt.srt_ext.models"  # checkpoints whose config.json asks for a state
ADAPTER_PACKAGE = "sgl_rwttt.srt_ext.adapter_models"  # --ttt-backend lora_delta
STREAMING_TOKENS = 1 << 20  # a model without KV: tokens that may run or be cached, an index each


def register() -> None:
    """Install what this process needs (called by SGLang's ``load_plugins``)."""
    from .streaming_config import register_config

    register_config()
    _register_resolution()
    register_attention()
    if multiprocessing.parent_process() is not None and os.environ.get(ENV_ACTIVE) == "1":
        _register_worker()
    else:
        _register_launcher()


def _register_resolution() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_cpu_backends")(_resolve_device)
    register_resolution_hook("handle_cuda_graph_config")(_resolve_cuda_graph)
    register_resolution_hook("handle_cache_compatibility")(_resolve_cache)
    register_resolution_hook("handle_other_validations")(_resolve_refusals)


def _register_launcher() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.add_cli_args", _after_add_cli_args, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.from_cli_args", _before_from_cli_args, HookType.BEFORE
    )
    _register_tokenizer()
    in_engine = "sglang.srt.entrypoints.engine" in sys.modules
    if "sglang.srt.entrypoints.http_server" in sys.modules or not in_engine:
        from . import http

        http.include_routes()


def _register_tokenizer() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import io, links, report, sessions

    io.register_types()
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
        links.after_init_communicators,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        report.after_update_request_meta_info,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.open_session",
        sessions.around_open_session,
        HookType.AROUND,
    )


def _register_worker() -> None:
    from . import io

    io.register_types()
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache import registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .dispatch import controller_class
    from .logs import hide_owner_ids
    from .radix import build_cache
    from .scheduler import scheduler_class

    hide_owner_ids()
    registry.register_radix_cache_backend(RADIX_BACKEND, build_cache)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler",
        scheduler_class(scheduler.Scheduler),
        HookType.REPLACE,
    )
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        from sglang.srt.managers import data_parallel_controller

        HookRegistry.register(
            "sglang.srt.managers.data_parallel_controller.DataParallelController",
            controller_class(data_parallel_controller.DataParallelController),
            HookType.REPLACE,
        )


def _after_add_cli_args(_result: Any, parser: Any) -> None:
    add_arguments(parser)


def _before_from_cli_args(*args: Any) -> None:
    publish_arguments(args[-1])


def _ttt_config(server_args: Any) -> dict[str, Any] | None:
    """The checkpoint's config when it is served with a rule, else None; read once per launch."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from .checkpoint import is_ttt, read_config

    if not hasattr(server_args, "_sgl_rwttt"):
        view = resolving_view(server_args)
        try:
            config = read_config(view.model_path, view.json_model_override_args)
        except (OSError, ValueError):
            return None  # not ours to report: SGLang names the unreadable checkpoint itself
        asked = TTTOptions.from_env().backend is not None
        server_args._sgl_rwttt = config if asked or is_ttt(config) else None
    found: dict[str, Any] | None = server_args._sgl_rwttt
    return found


def _resolve_device(server_args: Any, previous: Any) -> None:
    """On the CPU: the verified attention, and float32 where the checkpoint has it (not float16)."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    from .checkpoint import is_streaming

    config, view = _ttt_config(server_args), resolving_view(server_args)
    if config is not None and view.device == "cpu":
        bind_cpus(view.dp_size)
        declared: dict[str, Any] = {}
        if view.attention_backend is None:
            kind = "torch_native" if is_streaming(config) else default_attention()
            declared["attention_backend"] = kind
        if view.dtype == "auto" and "float32" in (config.get("dtype"), config.get("torch_dtype")):
            declared["dtype"] = "float32"
        declare_resolution(server_args, "sgl_rwttt", **declared)
    previous(server_args)


def _resolve_cuda_graph(server_args: Any, previous: Any) -> None:
    """State, or the plan of ``rwttt_cpu``, is Python inside the forward pass: no graph capture."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if _ttt_config(server_args) is not None or is_asked_for(resolving_view(server_args)):
        declare_resolution(server_args, "sgl_rwttt", disable_cuda_graph=True)
    previous(server_args)


def _resolve_cache(server_args: Any, previous: Any) -> None:
    """Turn the runtime on for a TTT checkpoint, off for any other."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    from .checkpoint import check_adapters, check_checkpoint, is_streaming

    config = _ttt_config(server_args)
    if config is None:
        _deactivate()
        previous(server_args)
        return
    view, options = resolving_view(server_args), TTTOptions.from_env()
    if options.backend is None:
        check_checkpoint(view.model_path, config)
    else:
        check_adapters(config, options)
    check_seams()
    if options.snapshot_dir is not None:
        check_folder(options.snapshot_dir)
    _activate(MODEL_PACKAGE if options.backend is None else ADAPTER_PACKAGE)
    declared: dict[str, Any] = {"disable_overlap_schedule": True}
    if view.radix_cache_backend is None:
        declared["radix_cache_backend"] = RADIX_BACKEND
    if is_streaming(config) and view.max_total_tokens is None:
        declared["max_total_tokens"] = STREAMING_TOKENS
    declare_resolution(server_args, "sgl_rwttt", **declared)
    previous(server_args)


def _resolve_refusals(server_args: Any, previous: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    refuse_misuse(resolving_view(server_args))
    if _ttt_config(server_args) is not None:
        refuse_unsupported(resolving_view(server_args))


def _activate(package: str) -> None:
    other = os.environ.get(ENV_MODELS)
    if other not in (None, "", MODEL_PACKAGE, ADAPTER_PACKAGE):
        raise ValueError(
            f"{ENV_MODELS}={other!r} cannot be combined with a TTT checkpoint: unset it"
        )
    os.environ[ENV_MODELS] = package
    os.environ[ENV_ACTIVE] = "1"
    os.environ[ENV_BOOT] = secrets.token_hex(8)


def _deactivate() -> None:
    for name in (ENV_ACTIVE, ENV_BOOT):
        os.environ.pop(name, None)
    if os.environ.get(ENV_MODELS) in (MODEL_PACKAGE, ADAPTER_PACKAGE):
        del os.environ[ENV_MODELS]
