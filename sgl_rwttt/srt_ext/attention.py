"""The attention backend ``rwttt_cpu``: its name, its registration, and where it may not be used."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from .refusals import RefusedFlag

CPU_ATTENTION = "rwttt_cpu"
_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def register_attention() -> None:
    """Make the name known to SGLang: a choice everywhere, a class in the scheduler process.

    Does not depend on the checkpoint: any model may ask for it by name.
    """
    from sglang.srt.arg_groups import choices

    if CPU_ATTENTION not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([CPU_ATTENTION])
    is_child = multiprocessing.parent_process() is not None
    if is_child and "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(CPU_ATTENTION)(_create)


def _create(model_runner: Any) -> Any:
    from .cpu_attention import CPUAttnBackend
    from .cpu_linear import use_few_rows

    use_few_rows(model_runner.model)
    return CPUAttnBackend(model_runner)


def is_asked_for(config: Any) -> bool:
    """Whether prefill or decode of the resolved configuration uses the backend."""
    return any(getattr(config, field) == CPU_ATTENTION for field in _FIELDS)


def default_attention() -> str:
    """The backend of a CPU server that names none; stock where SGLang found a GPU.

    There SGLang takes every name that it does not know for one whose helpers are Triton kernels.
    """
    return "torch_native" if _launches_triton() else CPU_ATTENTION


def refuse_misuse(config: Any) -> None:
    """Raise RefusedFlag where the backend is asked for and SGLang would not run it right."""
    if not is_asked_for(config):
        return
    field = next(field for field in _FIELDS if getattr(config, field) == CPU_ATTENTION)
    asked = f"--{field.replace('_', '-')}={CPU_ATTENTION!r}"
    if config.device != "cpu":
        raise RefusedFlag(
            f"{asked} runs on the CPU and --device is {config.device!r}: leave it out"
        )
    if _launches_triton():
        raise RefusedFlag(
            f"{asked} needs a process that sees no GPU: set CUDA_VISIBLE_DEVICES='' "
            "or take torch_native"
        )
    if config.page_size not in (None, 1):
        raise RefusedFlag(f"{asked} needs --page-size 1, not {config.page_size}")


def _launches_triton() -> bool:
    from sglang.srt.utils.common import support_triton

    return bool(support_triton(CPU_ATTENTION))
