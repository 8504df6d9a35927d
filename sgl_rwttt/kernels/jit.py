"""Kernels for the CPU that Numba compiles and torch's own threads run.

A second pool of threads beside torch's would fight with it over the cores: OpenMP threads spin
while they wait. So a kernel is a C function of one pointer, and the OpenMP runtime that torch has
loaded runs it on the threads that run torch's own loops.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

# Sums may be reordered, so that they are vectorized; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_LINE = 64  # bytes

inlined = njit(inline="always", fastmath=_FAST)  # decorates what a kernel is made of

_omp_thread = types.ExternalFunction("sgl_rwttt_omp_get_thread_num", types.int32())
_omp_threads = types.ExternalFunction("sgl_rwttt_omp_get_num_threads", types.int32())


@cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime of torch, if it can be asked to run a C function."""
    if config.DISABLE_JIT:
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_uint] * 2
        library.GOMP_parallel.restype = None
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(f"sgl_rwttt_{name}", address)
    except (OSError, AttributeError):
        return None
    return library


def is_available() -> bool:
    """Whether kernels can run here: torch's wheels for Linux, with GNU's OpenMP, can run them."""
    return _runtime() is not None


class Kernel:
    """A compiled kernel: ``function(pointer)``, where ``numbers(pointer, n)`` are the arguments."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._compiled: Any = None

    def __call__(self, threads: int, *arguments: Tensor | float) -> None:
        """Run it on at most ``threads`` threads of torch, each of which sees all arguments.

        A tensor is passed as its address, so it has to be contiguous, of the dtype that the kernel
        expects, and alive until the call ends. Integers are passed as they are; floats are for
        ``as_float``.
        """
        self.compile()
        values = (ctypes.c_int64 * len(arguments))(*map(_as_int64, arguments))
        library = _runtime()
        assert library is not None
        library.GOMP_parallel(self._compiled.address, ctypes.addressof(values), threads, 0)

    def compile(self) -> None:
        """Compile it, or load what an earlier process compiled; nothing the second time.

        Raises RuntimeError where kernels cannot run.
        """
        if self._compiled is not None:
            return
        if not is_available():
            raise RuntimeError("torch's OpenMP runtime cannot run kernels: see is_available()")
        signature = types.void(types.CPointer(types.int64))
        try:
            self._compiled = cfunc(signature, cache=True, fastmath=_FAST)(self._function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            self._compiled = cfunc(signature, fastmath=_FAST)(self._function)


def _as_int64(argument: Tensor | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, int):
        return argument
    bits: int = struct.unpack("q", struct.pack("d", argument))[0]
    return bits


# What follows is for use inside of kernels. Numba types these functions, not mypy.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,type-arg"


@intrinsic
def _pointer(typing, address):
    def lower(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), lower


@intrinsic
def as_float(typing, argument):
    """The float that an argument was, as float64."""

    def lower(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float64))

    return types.float64(types.int64), lower


@intrinsic
def _float_of_bits(typing, bits):
    def lower(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), lower


@intrinsic
def _prefetch(typing, address):
    def lower(context, builder, signature, args):
        integer = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [pointer, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(types.int64), lower


@njit(inline="always")
def numbers(pointer, count):
    """The arguments of a kernel, int64 [count]."""
    return carray(pointer, (count,))


@njit(inline="always")
def floats(address, shape):
    """The float32 tensor that an argument was."""
    return carray(_pointer(address), shape, np.float32)


@njit(inline="always")
def integers(address, shape):
    """The int64 tensor that an argument was."""
    return carray(_pointer(address), shape, np.int64)


@njit(inline="always")
def thread():
    """(number of this thread, how many run this kernel): perhaps fewer than were asked for."""
    return _omp_thread(), _omp_threads()


@njit(inline="always")
def prefetch(address, count):
    """Begin to bring ``count`` bytes at an address into the cache; any address will do."""
    for line in range(0, count, _LINE):
        _prefetch(address + line)


@inlined
def exp(x):
    """e^x of a float32 x <= 0 to 2e-7 of it, in a form that is vectorized; 0 below -87 (1e-38).

    2^n e^r with n the nearest integer to x / ln 2; ln 2 in two parts (Cody and Waite 1980), e^r by
    its Taylor series for abs(r) <= ln 2 / 2.
    """
    low = np.float32(-87.0)
    x = low if x < low else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
