"""Compile what the launchers launch for a GPU that this machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages")


@contextmanager
def compiled() -> Iterator[list[tuple[str, Any]]]:
    """Inside, a launch compiles its kernel as for contiguous, aligned tensors, and runs nothing.

    Yields (kernel name, compiled kernel) of every launch so far.
    """
    done: list[tuple[str, Any]] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        done.append((kernel.fn.__name__, _compile(kernel, args, kwargs)))

    with patch.object(JITFunction, "run", run):
        yield done


def _compile(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        aligned = isinstance(value, Tensor) and not parameter.do_not_specialize_on_alignment
        if aligned or (special and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=HOPPER, options=options)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"
