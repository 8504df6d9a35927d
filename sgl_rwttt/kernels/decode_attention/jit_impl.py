"""Decode attention compiled: K and V are read once, where they are, in the order of memory.

A task goes through its slots in blocks, with all heads of a block before the next, and keeps a
running maximum. Source: the online softmax of FlashAttention (Dao et al. 2022), and its split of
one row among workers (Flash-Decoding, Dao et al. 2023).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgl_rwttt.kernels.attention import Scratch
from sgl_rwttt.kernels.decode_attention.jit_plan import TaskPlan, plan_tasks
from sgl_rwttt.kernels.decode_attention.torch_impl import add_shared
from sgl_rwttt.kernels.jit import (
    Kernel,
    as_float,
    exp,
    floats,
    inlined,
    integers,
    numbers,
    prefetch,
    thread,
)

_BLOCK = 32  # slots whose scores are kept at a time; their K and V stay in the cache
_AHEAD = 4  # slots that K is fetched ahead of its use; V is fetched while the scores are computed


class JitDecodeAttention:
    """See ``DecodeAttention``; float32. Sums are float32, in an order of their own."""

    plan_type = TaskPlan

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        attend.compile()
        combine.compile()

    def plan(self, slots: Tensor, lengths: Sequence[int], row_bytes: int) -> TaskPlan:
        """See ``DecodeAttention.plan``; for the threads that torch has now."""
        return plan_tasks(slots, lengths, row_bytes, torch.get_num_threads())

    def run(self, q: Tensor, K: Tensor, V: Tensor, plan: TaskPlan, scale: float) -> Tensor:
        """See ``DecodeAttention.run``."""
        q = q.contiguous()
        rows, heads, size = q.shape
        parts, partials = plan.parts, plan.owners.shape[0]
        sums, states = torch.empty(partials, heads, size), torch.empty(partials, heads, 2)
        scratch = torch.empty(parts, heads, _BLOCK + 1)
        attend(
            min(parts, torch.get_num_threads()),
            *(plan.slots, plan.tasks, plan.bounds, plan.owners),
            *(q, K, V, sums, states, scratch),
            *(plan.slots.numel(), plan.tasks.shape[0], parts, partials),
            *(rows, heads, size, K.shape[0], K.shape[1]),
            float(scale),
        )
        out, lse = torch.empty(rows, heads, size), torch.empty(rows, heads)
        combine(1, *(plan.order, plan.firsts, sums, states, out, lse), partials, rows, heads, size)
        if plan.shared:
            groups = (rows, K.shape[1], heads // K.shape[1])
            grouped, whole = q.view(*groups, size), out.view(*groups, size)
            add_shared(plan.shared, grouped, whole, lse.view(groups), K, V, scale, self._scratch)
        return out


def _attend(pointer):
    """Of each task and row: the sum of V with unnormalized weights, and the scores' (max, sum)."""
    arguments = numbers(pointer, 20)
    slots, tasks, bounds, owners, q, at_k, at_v, sums, states, scratch = arguments[:10]
    slot_count, task_count, parts, partials, rows, heads, size, pool, kv_heads = arguments[10:19]
    scale = np.float32(as_float(arguments[19]))
    slots, tasks = integers(slots, (slot_count,)), integers(tasks, (task_count, 4))
    bounds, owners = integers(bounds, (parts + 1,)), integers(owners, (partials,))
    q = floats(q, (rows, heads, size))
    K, V = floats(at_k, (pool, kv_heads, size)), floats(at_v, (pool, kv_heads, size))
    sums, states = floats(sums, (partials, heads, size)), floats(states, (partials, heads, 2))
    number, threads = thread()
    for part in range(number, parts, threads):
        own = floats(scratch, (parts, heads, _BLOCK + 1))[part]
        weights, tops = own[:, :_BLOCK], own[:, _BLOCK]
        for task in range(bounds[part], bounds[part + 1]):
            first, count, partial, members = tasks[task]
            sums[partial : partial + members] = 0
            states[partial : partial + members, :, 0] = -np.inf
            states[partial : partial + members, :, 1] = 0
            for start in range(first, first + count, _BLOCK):
                read = slots[start : min(start + _BLOCK, first + count)]
                for i in range(partial, partial + members):
                    for head in range(heads):
                        tops[head] = states[i, head, 0]
                    _scores(q[owners[i]], K, at_k, at_v, read, scale, weights, tops)
                    for head in range(heads):
                        _softmax(
                            weights[head], read.shape[0], tops[head], sums[i, head], states[i, head]
                        )
                    _values(weights, V, read, sums[i])


@inlined
def _scores(q, K, at_k, at_v, slots, scale, scores, tops):
    """scores[h, s] = scale q[h] . K[slots[s], h's]; tops[h] is raised to the largest of them."""
    heads, size = q.shape
    kv_heads = K.shape[1]
    group, step, last = heads // kv_heads, kv_heads * size * 4, slots.shape[0] - 1
    for s in range(last + 1):
        slot = slots[s]
        prefetch(at_k + slots[min(s + _AHEAD, last)] * step, step)
        prefetch(at_v + slot * step, step)
        for kv_head in range(kv_heads):
            h = kv_head * group
            end = h + group
            while h + 3 <= end:
                a = b = c = np.float32(0)
                for d in range(size):
                    k = K[slot, kv_head, d]
                    a += k * q[h, d]
                    b += k * q[h + 1, d]
                    c += k * q[h + 2, d]
                a, b, c = a * scale, b * scale, c * scale
                scores[h, s], scores[h + 1, s], scores[h + 2, s] = a, b, c
                tops[h] = max(tops[h], a)
                tops[h + 1] = max(tops[h + 1], b)
                tops[h + 2] = max(tops[h + 2], c)
                h += 3
            while h < end:
                a = np.float32(0)
                for d in range(size):
                    a += K[slot, kv_head, d] * q[h, d]
                a *= scale
                scores[h, s] = a
                tops[h] = max(tops[h], a)
                h += 1


@inlined
def _softmax(scores, count, top, out, state):
    """The scores of one query to weights; what it has summed so far, to the new maximum."""
    if state[0] != top:
        shrink = exp(state[0] - top)
        for d in range(out.shape[0]):
            out[d] *= shrink
        state[0] = top
        state[1] *= shrink
    total = np.float32(0)
    for s in range(count):
        weight = exp(scores[s] - top)
        scores[s] = weight
        total += weight
    state[1] += total


@inlined
def _values(weights, V, slots, out):
    """out[h] += weights[h] . V[slots, h's], four slots at a time."""
    heads, size = out.shape
    group = heads // V.shape[1]
    s = 0
    while s + 4 <= slots.shape[0]:
        i, j, k, m = slots[s], slots[s + 1], slots[s + 2], slots[s + 3]
        for h in range(heads):
            g = h // group
            a, b, c, e = weights[h, s], weights[h, s + 1], weights[h, s + 2], weights[h, s + 3]
            for d in range(size):
                out[h, d] += a * V[i, g, d] + b * V[j, g, d] + c * V[k, g, d] + e * V[m, g, d]
        s += 4
    while s < slots.shape[0]:
        i = slots[s]
        for h in range(heads):
            a = weights[h, s]
            for d in range(size):
                out[h, d] += a * V[i, h // group, d]
        s += 1


def _combine(pointer):
    """The output of each row and its log-sum-exp; zeros and -inf where it has no partial result."""
    arguments = numbers(pointer, 10)
    order, firsts, sums, states, out, lse = arguments[:6]
    partials, rows, heads, size = arguments[6:]
    order, firsts = integers(order, (partials,)), integers(firsts, (rows + 1,))
    sums, states = floats(sums, (partials, heads, size)), floats(states, (partials, heads, 2))
    out, lse = floats(out, (rows, heads, size)), floats(lse, (rows, heads))
    number, threads = thread()
    for row in range(number, rows, threads):
        first, last = firsts[row], firsts[row + 1]
        for head in range(heads):
            top = np.float32(-np.inf)
            for i in range(first, last):
                top = max(top, states[order[i], head, 0])
            total = np.float32(0)
            out[row, head] = 0
            for i in range(first, last):
                share = exp(states[order[i], head, 0] - top)
                total += share * states[order[i], head, 1]
                for d in range(size):
                    out[row, head, d] += share * sums[order[i], head, d]
            lse[row, head] = top + np.log(total)
            if last > first:
                for d in range(size):
                    out[row, head, d] /= total


attend, combine = Kernel(_attend), Kernel(_combine)
